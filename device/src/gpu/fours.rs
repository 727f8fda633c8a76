//! Four neighbouring columns of a matrix of floats, of several of its rows at a time: what a thread has of the outputs
//! of many rows.

use super::{BF16, F32, Tensor, load, store};
use crate::arch::{memory, scalar};
use core::hint::cold_path;

/// Four columns: where those of row 0 are, and what makes those of another of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fours {
    start: *mut u8,
    /// Bytes from row to row.
    apart: u32,
    /// How many of the four there are.
    there: u32,
    form: Form,
    dtype: u16,
}

/// How they lie: what is asked once for all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// There is no matrix: its elements are zero.
    Absent,
    /// All four are there in every row, on a multiple of their bytes.
    Singles,
    Brains,
    /// One by one.
    Others,
}

impl Fours {
    /// Those of `matrix`, which may be absent, from column `n` on; `n` is below its columns.
    pub(crate) fn of(matrix: &Tensor, n: u32) -> Fours {
        let apart = if matrix.is_present() { matrix.stride(0) * matrix.elem_bytes() as u32 } else { 0 };
        Fours::new(matrix, [n, matrix.extent(1)], apart)
    }

    /// Those of `vector`, which may be absent, from element `n` on, whatever the row; `n` is below its elements.
    pub(crate) fn of_vector(vector: &Tensor, n: u32) -> Fours {
        Fours::new(vector, [n, vector.extent(0)], 0)
    }

    fn new(tensor: &Tensor, [n, end]: [u32; 2], apart: u32) -> Fours {
        if !tensor.is_present() {
            return Fours { start: core::ptr::null_mut(), apart, there: 0, form: Form::Absent, dtype: 0 };
        }
        let (start, size) = (tensor.row([]).at(n), tensor.elem_bytes() as usize);
        let is_whole = n + 4 <= end && (start.addr() | apart as usize).is_multiple_of(4 * size);
        let form = match tensor.dtype() {
            F32 if is_whole => Form::Singles,
            BF16 if is_whole => Form::Brains,
            _ => Form::Others,
        };
        Fours { start, apart, there: (end - n).min(4), form, dtype: tensor.dtype() }
    }

    /// How many of the four there are.
    pub(crate) fn there(&self) -> u32 {
        self.there
    }

    /// Whether there is a matrix.
    pub(crate) fn is_present(&self) -> bool {
        self.form != Form::Absent
    }

    /// Where rows `r` have theirs.
    fn places<const R: usize>(&self, r: [u32; R]) -> [*mut u8; R] {
        // A number that a compiler knows nothing of, so that each product is one instruction.
        let apart = u64::from(memory::opaque_word(self.apart));
        r.map(|r| self.start.wrapping_add((u64::from(r) * apart) as usize))
    }

    /// Where, of a row's that are at `place`, number `column` is.
    fn one(&self, place: *mut u8, column: usize) -> *mut u8 {
        place.wrapping_add(column * if self.dtype == F32 { 4 } else { 2 })
    }

    /// Those of rows `r`, all of them asked for before the first is looked at; zero where there are none.
    ///
    /// # Safety
    /// The rows are there, and nobody writes these elements meanwhile.
    #[track_caller]
    pub(crate) unsafe fn get<const R: usize>(&self, r: [u32; R]) -> [[f32; 4]; R] {
        let mut fours = [[0.0; 4]; R];
        if self.form == Form::Absent {
            return fours;
        }
        let places = self.places(r);
        // SAFETY: the elements are there (caller), and as aligned as the form says.
        unsafe {
            if self.form == Form::Brains {
                let words = places.map(|place| memory::load(place.cast::<u64>()));
                fours = words.map(|four| {
                    let (low, high) = (four as u32, (four >> 32) as u32);
                    [low << 16, low & 0xffff_0000, high << 16, high & 0xffff_0000].map(f32::from_bits)
                });
            } else if self.form == Form::Singles {
                fours = places.map(|place| memory::load16(place)).map(|four| four.map(f32::from_bits));
            } else {
                cold_path();
                for i in 0..R {
                    for column in 0..4 {
                        if (column as u32) < self.there {
                            fours[i][column] = load(self.dtype, self.one(places[i], column));
                        }
                    }
                }
            }
        }
        fours
    }

    /// Sets those of rows `r` that are there, rounding to nearest even. The same row may come twice, with the same
    /// values.
    ///
    /// # Safety
    /// The rows are there, and the calling thread is the only one to touch these elements now.
    #[track_caller]
    pub(crate) unsafe fn set<const R: usize>(&self, r: [u32; R], fours: [[f32; 4]; R]) {
        let places = self.places(r);
        // SAFETY: the elements are there (caller), and as aligned as the form says.
        unsafe {
            match self.form {
                Form::Brains => {
                    for i in 0..R {
                        let [a, b, c, d] = fours[i];
                        let (low, high) = (scalar::f32_to_bf16_pair(a, b), scalar::f32_to_bf16_pair(c, d));
                        memory::store(places[i].cast::<u64>(), u64::from(low) | u64::from(high) << 32);
                    }
                }
                Form::Singles => {
                    for i in 0..R {
                        memory::store16(places[i], fours[i].map(f32::to_bits));
                    }
                }
                Form::Others => {
                    cold_path();
                    for i in 0..R {
                        for column in 0..4 {
                            if (column as u32) < self.there {
                                store(self.dtype, self.one(places[i], column), fours[i][column]);
                            }
                        }
                    }
                }
                Form::Absent => {}
            }
        }
    }
}
