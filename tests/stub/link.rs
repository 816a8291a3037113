//! The JIT linker: PTX in, an image out.

use super::*;

/// A link that is going on: its options and its image.
struct Link {
    num: u32,
    options: *const i32,
    values: *const *mut c_void,
    image: Vec<u8>,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkCreate_v2(
    num: u32,
    options: *const i32,
    values: *const *mut c_void,
    out: *mut *mut c_void,
) -> i32 {
    need_context!();
    let link = Link { num, options, values, image: Vec::new() };
    *out = Box::into_raw(Box::new(link)).cast();
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkAddData_v2(
    link: *mut c_void,
    kind: i32,
    data: *const u8,
    bytes: usize,
    _name: *const c_char,
    _num: u32,
    _options: *const i32,
    _values: *const *mut c_void,
) -> i32 {
    need_context!();
    let link = &mut *link.cast::<Link>();
    let Ok(text) = CStr::from_bytes_with_nul(std::slice::from_raw_parts(data, bytes)) else {
        return INVALID_VALUE;
    };
    // An ELF header without tables, then the text.
    link.image = vec![0; 64];
    link.image[..6].copy_from_slice(b"\x7fELF\x02\x01");
    link.image.extend_from_slice(text.to_bytes());
    if kind != 1 {
        return INVALID_VALUE;
    }
    assemble(&text.to_string_lossy(), link.num, link.options, link.values)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkComplete(
    link: *mut c_void,
    image: *mut *mut c_void,
    bytes: *mut usize,
) -> i32 {
    let link = &mut *link.cast::<Link>();
    *image = link.image.as_mut_ptr().cast();
    *bytes = link.image.len();
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLinkDestroy(link: *mut c_void) -> i32 {
    drop(Box::from_raw(link.cast::<Link>()));
    0
}
