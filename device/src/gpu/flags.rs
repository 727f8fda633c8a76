//! [Flagged](perpetua_shared::flag) elements, as bodies write and read them: an operand says whether its elements are.
//!
//! Whoever writes one is done with it; whoever reads one asks for it until it is there, each thread for what it wants
//! itself, with no barrier and no counter between the two. A reader in vain reports that and goes on with what it
//! found: whatever it waits for next finds the fault, and the last of a worker's waits, which is for an event, sends it
//! home.

use super::sync::Patience;
use super::tiles::Waited;
use super::{Call, Row, Tensor};
use crate::arch::atomic;
use core::hint::cold_path;
use perpetua_shared::FaultCode;
use perpetua_shared::flag::{self, MASK};

/// What has been read of an operand, perhaps too early.
pub(crate) trait Read {
    /// 0 if every element has flag `flag`.
    fn lacks(&self, flag: u32) -> u32;
}

impl Read for u32 {
    fn lacks(&self, flag: u32) -> u32 {
        (self ^ flag) & MASK
    }
}

impl<T: Read, const N: usize> Read for [T; N] {
    fn lacks(&self, flag: u32) -> u32 {
        // By four, so that few of them wait for another.
        let mut lacks = [0; 4];
        for i in 0..N {
            lacks[i % 4] |= self[i].lacks(flag);
        }
        let [a, b, c, d] = lacks;
        (a | b) | (c | d)
    }
}

impl<A: Read, B: Read> Read for (A, B) {
    fn lacks(&self, flag: u32) -> u32 {
        self.0.lacks(flag) | self.1.lacks(flag)
    }
}

/// How what has been read too early is read again: by a closure, or, where that is so much that the compiler would not
/// take a closure for part of its caller, by something else.
pub(crate) trait Again<T> {
    /// Reads it.
    fn again(&self) -> T;
}

impl<T, F: Fn() -> T> Again<T> for F {
    fn again(&self) -> T {
        self()
    }
}

/// Flagged words as numbers.
pub(crate) fn unmarked<const N: usize>(words: [u32; N]) -> [f32; N] {
    let mut values = [0.0; N];
    for i in 0..N {
        values[i] = flag::unmark(words[i]);
    }
    values
}

/// Eight flagged words, as numbers if they are there, or zeros.
fn numbers(words: [[u32; 4]; 2], are_there: bool) -> [f32; 8] {
    let ([a, b, c, d], [e, f, g, h]) = (unmarked(words[0]), unmarked(words[1]));
    if are_there { [a, b, c, d, e, f, g, h] } else { [0.0; 8] }
}

/// Where eights of a flagged row lie.
struct Eights([*const u32; 4]);

impl Eights {
    /// Asks for them.
    ///
    /// # Safety
    /// They are there, on sixteen bytes.
    unsafe fn ask(&self) -> [[[u32; 4]; 2]; 4] {
        let [a, b, c, d] = self.0;
        let four = |at: *const u32| {
            // SAFETY: the caller's promise.
            unsafe { atomic::load16_relaxed(at) }
        };
        let [e, f, g, h] = [a.wrapping_add(4), b.wrapping_add(4), c.wrapping_add(4), d.wrapping_add(4)];
        [[four(a), four(e)], [four(b), four(f)], [four(c), four(g)], [four(d), four(h)]]
    }
}

impl Again<[[[u32; 4]; 2]; 4]> for &Eights {
    fn again(&self) -> [[[u32; 4]; 2]; 4] {
        // SAFETY: they were there when they were asked for first.
        unsafe { self.ask() }
    }
}

impl Call<'_> {
    /// The flag of what this pass writes.
    fn flag(&self) -> u32 {
        flag::of_run(self.program_runs)
    }

    /// Sets the element at `at` of `tensor`.
    ///
    /// # Safety
    /// As [`Tensor::set`].
    #[track_caller]
    pub(crate) unsafe fn put<const N: usize>(&self, tensor: &Tensor, at: [u32; N], value: f32) {
        // SAFETY: the caller's promise.
        unsafe { self.put_at(tensor, tensor.address(at), value) }
    }

    /// Sets element `i` of `row`, which is one of `tensor`'s.
    ///
    /// # Safety
    /// As [`Row::set`].
    #[track_caller]
    pub(crate) unsafe fn put_in_row(&self, tensor: &Tensor, row: &Row, i: u32, value: f32) {
        // SAFETY: the caller's promise.
        unsafe { self.put_at(tensor, row.at(i), value) }
    }

    /// Sets elements `i` to `i` + 3 of `row`, which is one of `tensor`'s.
    ///
    /// # Safety
    /// As [`Row::set`].
    #[track_caller]
    pub(crate) unsafe fn put_four(&self, tensor: &Tensor, row: &Row, i: u32, four: [f32; 4]) {
        // SAFETY: the caller's promise; flagged elements are words that are only touched atomically.
        unsafe {
            if tensor.is_flagged() {
                let (flag, to) = (self.flag(), row.at(i).cast::<u32>());
                let [a, b, c, d] = four;
                let words = [flag::mark(a, flag), flag::mark(b, flag), flag::mark(c, flag), flag::mark(d, flag)];
                if to.addr().is_multiple_of(16) {
                    atomic::store16_relaxed(to, words);
                } else {
                    cold_path();
                    for j in 0..4 {
                        atomic::store_relaxed(to.wrapping_add(j), words[j]);
                    }
                }
            } else {
                cold_path();
                for j in 0..4 {
                    row.set(i + j as u32, four[j]);
                }
            }
        }
    }

    /// Sets the element of `tensor` that lies at `to`.
    ///
    /// # Safety
    /// As [`Tensor::set`].
    #[track_caller]
    unsafe fn put_at(&self, tensor: &Tensor, to: *mut u8, value: f32) {
        // SAFETY: the caller's promise; flagged elements are words that are only touched atomically.
        unsafe {
            if tensor.is_flagged() {
                self.mark_at(to, value);
            } else {
                cold_path();
                super::store(tensor.dtype(), to, value);
            }
        }
    }

    /// Sets element `i` of `row`, which is one of a flagged tensor's.
    ///
    /// # Safety
    /// As [`Row::set`].
    pub(crate) unsafe fn put_flagged(&self, row: &Row, i: u32, value: f32) {
        // SAFETY: the caller's promise.
        unsafe { self.mark_at(row.at(i), value) }
    }

    /// # Safety
    /// A flagged element is `to`.
    unsafe fn mark_at(&self, to: *mut u8, value: f32) {
        // SAFETY: flagged elements are words that are only touched atomically.
        unsafe { atomic::store_relaxed(to.cast(), flag::mark(value, self.flag())) };
    }

    /// Asks for the element at `at` of `tensor`, for [`told`](Call::told) to look at.
    ///
    /// # Safety
    /// As [`Tensor::get`].
    #[track_caller]
    pub(crate) unsafe fn ask<const N: usize>(&self, tensor: &Tensor, at: [u32; N]) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            if tensor.is_flagged() {
                atomic::load_relaxed(tensor.address(at).cast_const().cast())
            } else {
                tensor.get(at).to_bits()
            }
        }
    }

    /// The element at `at` of operand `operand`, which is `tensor`, [asked](Call::ask) for before.
    ///
    /// # Safety
    /// As [`Tensor::get`].
    #[track_caller]
    pub(crate) unsafe fn told<const N: usize>(&self, operand: usize, tensor: &Tensor, at: [u32; N], asked: u32) -> f32 {
        if !tensor.is_flagged() {
            cold_path();
            return f32::from_bits(asked);
        }
        // SAFETY: the caller's promise.
        let [value] = unmarked(self.there(operand, [asked], || unsafe { [self.ask(tensor, at)] }));
        value
    }

    /// Elements `at` of `row`, which is one of operand `operand`'s, all of them asked for together.
    ///
    /// # Safety
    /// As [`Row::get`].
    #[track_caller]
    pub(crate) unsafe fn gather<const N: usize>(&self, operand: usize, row: &Row, at: [u32; N]) -> [f32; N] {
        // SAFETY: the caller's promise.
        unsafe {
            if !self.tensor(operand).is_flagged() {
                cold_path();
                return row.gather(at);
            }
            let ask = || {
                let mut words = [0; N];
                for i in 0..N {
                    words[i] = atomic::load_relaxed(row.at(at[i]).cast_const().cast());
                }
                words
            };
            unmarked(self.once_there(operand, ask))
        }
    }

    /// As [`Row::eights`], of `row`, which is one of operand `operand`'s.
    ///
    /// # Safety
    /// As [`Row::get`]; a flagged row has whole eights, which start on sixteen bytes.
    #[track_caller]
    pub(crate) unsafe fn eights(&self, operand: usize, row: &Row, at: [u32; 4], n: u32) -> [[f32; 8]; 4] {
        // SAFETY: the caller's promise; what is beyond the row is its beginning, which is not looked at.
        unsafe {
            if !self.tensor(operand).is_flagged() {
                cold_path();
                return row.eights(at, n);
            }
            let place = |at: u32| row.at(if at < n { at } else { 0 }).cast_const().cast();
            let eights = Eights([place(at[0]), place(at[1]), place(at[2]), place(at[3])]);
            let [a, b, c, d] = self.once_there(operand, &eights);
            [numbers(a, at[0] < n), numbers(b, at[1] < n), numbers(c, at[2] < n), numbers(d, at[3] < n)]
        }
    }

    /// Sets the eight elements from `at`, a multiple of eight, on of `row`, one of `tensor`'s, as far as they are below
    /// `n`, where it ends.
    ///
    /// # Safety
    /// As [`Row::set`].
    #[track_caller]
    pub(crate) unsafe fn put_eight(&self, tensor: &Tensor, row: &Row, at: u32, n: u32, eight: [f32; 8]) {
        // SAFETY: the caller's promise.
        unsafe {
            if !tensor.is_flagged() {
                return row.set_eight(at, n, eight);
            }
            for i in 0..8 {
                if at + (i as u32) < n {
                    self.put_in_row(tensor, row, at + i as u32, eight[i]);
                }
            }
        }
    }

    /// `found`, flagged elements of operand `operand`, or what `again` finds once they are there.
    ///
    /// PERF: looked at in one place, whether found at once or later: with a second one, for later, it was as much code
    /// again.
    pub(crate) fn there<T: Read>(&self, operand: usize, mut found: T, again: impl Again<T>) -> T {
        let mut wait = Wait::default();
        // First `again`, since what is looked at may have been asked for long ago.
        loop {
            let lacks = self.lacks(&found);
            if lacks == 0 || !self.goes_on(operand, lacks, &mut wait) {
                break;
            }
            found = again.again();
        }
        self.ends(&wait);
        found
    }

    /// What `again` finds, flagged elements of operand `operand`, once they are there.
    pub(crate) fn once_there<T: Read>(&self, operand: usize, again: impl Again<T>) -> T {
        let mut wait = Wait::default();
        let found = loop {
            let found = again.again();
            let lacks = self.lacks(&found);
            if lacks == 0 || !self.goes_on(operand, lacks, &mut wait) {
                break found;
            }
        };
        self.ends(&wait);
        found
    }

    /// 0 if `found`, flagged elements, are there.
    pub(crate) fn lacks(&self, found: &impl Read) -> u32 {
        found.lacks(self.flag())
    }

    /// Whether to look once more for elements of operand `operand`, of which [some are not there](Call::lacks): after a
    /// while of sleep. When it has been too long, which is reported, or when there has been a fault, it is not.
    pub(crate) fn goes_on(&self, operand: usize, lacks: u32, wait: &mut Wait) -> bool {
        let Some(tiles) = self.tiles else { return false };
        if wait.began_ns == 0 {
            wait.began_ns = tiles.now_ns();
        }
        let too_long = || {
            self.fault(FaultCode::NotWritten, operand as u32, lacks, self.flag());
        };
        !wait.patience.ends(tiles.sync(), too_long)
    }

    /// What was looked for is there, or [will not be](Call::goes_on).
    pub(crate) fn ends(&self, wait: &Wait) {
        if wait.began_ns != 0
            && let Some(tiles) = self.tiles
        {
            cold_path();
            tiles.waited(Waited::Tasks, wait.began_ns);
        }
        atomic::settled();
    }
}

/// A wait for flagged elements.
#[derive(Default)]
pub(crate) struct Wait {
    patience: Patience,
    /// When it began, if that is measured, else 0.
    began_ns: u64,
}
