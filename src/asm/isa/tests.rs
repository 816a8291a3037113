use super::*;
use crate::asm::test_machine::TestMachine;

/// The widths in the table are those that the rows' meanings use, and only memory has one.
#[test]
fn access_widths_are_those_of_the_meaning() {
    for row in table() {
        let inst = (row.example)(&mut Asm::new(), &mut |_| 0);
        let mut num_places = 0;
        inst.places(&mut |_| num_places += 1);
        let widths = TestMachine::widths_of(&inst);
        assert_eq!(num_places > 0, row.access_bytes > 0, "{}", row.text);
        assert_eq!(num_places > 0, !widths.is_empty(), "{}", row.text);
        assert!(widths.iter().all(|width| *width == row.access_bytes as usize), "{}", row.text);
    }
}

/// The builder method is the opcode and what tells two rows with one opcode apart.
#[test]
fn methods_are_unique_and_named_like_the_text() {
    let mut methods: Vec<_> = table().map(|row| row.method).collect();
    methods.sort_unstable();
    let all = methods.len();
    methods.dedup();
    assert_eq!(methods.len(), all);
    for row in table() {
        let first = row.text.split(['.', ' ', ';']).next().expect("text is not empty");
        assert!(row.method.starts_with(first), "{}: {}", row.method, row.text);
    }
}

#[test]
fn examples_are_of_their_row() {
    for row in table() {
        let inst = (row.example)(&mut Asm::new(), &mut |n| n - 1);
        assert_eq!(inst.row().method, row.method);
    }
}
