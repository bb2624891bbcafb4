//! Runs a program without a connection, by a test run of bpf(2).

use super::{bpf, fd_number};
use std::ffi::c_int;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::from_mut;

const PROG_TEST_RUN: c_int = 10;

#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    reserved: u32,
}

/// The input of a test run: `struct bpf_sk_lookup` of linux/bpf.h, with addresses as bytes.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Lookup {
    /// The cookie of the socket that the program chose. 0 if the program chose no socket.
    pub(crate) cookie: u64,
    pub(crate) family: u32,
    pub(crate) protocol: u32,
    pub(crate) remote_ip4: [u8; 4],
    pub(crate) remote_ip6: [u8; 16],
    pub(crate) remote_port: [u8; 2],
    pub(crate) reserved: [u8; 2],
    pub(crate) local_ip4: [u8; 4],
    pub(crate) local_ip6: [u8; 16],
    pub(crate) local_port: u32,
    pub(crate) interface: u32,
    pub(crate) padding: u32,
}

/// Runs a program as the kernel would for a new connection (Linux 5.13). Returns the cookie of the
/// chosen socket, or `None` if the program chooses no socket.
pub(crate) fn run(program: BorrowedFd<'_>, lookup: &Lookup) -> io::Result<Option<u64>> {
    const SK_PASS: u32 = 1;
    let (mut lookup, bytes) = (*lookup, size_of::<Lookup>() as u32);
    let context = from_mut(&mut lookup) as u64;
    let mut attr = TestRun {
        prog_fd: fd_number(program),
        ctx_size_in: bytes,
        ctx_size_out: bytes,
        ctx_in: context,
        ctx_out: context,
        ..TestRun::default()
    };
    // SAFETY: the context lives for the call, holds numbers only, and has the given length.
    unsafe { bpf(PROG_TEST_RUN, &mut attr) }?;
    assert_eq!(attr.retval, SK_PASS, "it never drops");
    Ok(Some(lookup.cookie).filter(|cookie| *cookie != 0))
}
