//! Branches, the end of a thread and clocks.
//!
//! A guarded branch may diverge; lanes reconverge where their paths meet.
//! Source: PTX ISA, "Control Flow Instructions" and "Special Registers" (clock64, globaltimer).

use super::{isa, ptx};
use crate::asm::reg::Label;

isa! {
    /// Control flow.
    Control;

    /// Continues at a label.
    bra = Bra { to: Label }
        "bra {to};", ptx(7, 0, 70), Lane, Control, |m, l, i| { m.jump(l, i.to)?; }
    /// Continues at a label, all lanes of the warp alike.
    bra_uni = BraUni { to: Label }
        "bra.uni {to};", ptx(7, 0, 70), Warp, Control, |m, i| { for l in super::lanes(m.active()) { m.jump(l, i.to)?; } }
    /// Ends the thread.
    exit = Exit {}
        "exit;", ptx(7, 0, 70), Lane, Control, |m, l, _i| { m.exit(l)?; }
}
