//! Tiles in registers. Arrays are indexed by constants, steps written out, so that they stay there.

use super::{CHUNK, Fours, Lane, Own, Rows, Tile, eights_at};
use crate::arch::{memory, warp};
use crate::gpu::Row;
use crate::gpu::math::larger;
use crate::gpu::thin::in_two;

/// 16 rows of `32 U` columns, U up to 4. Number `i` of `[u][j]` stands in row `g + 8 (i / 2)`, column `32u + 8t + 2j +
/// i % 2`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Eights<const U: usize>([[[f32; 4]; 4]; U]);

/// 16 rows of `64 W` columns, W up to 2. Number `i` of `[w][c]` stands in row `g + 8 (i / 2)`, column `64w + 16t + 8 (i
/// % 2) + c`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sixteens<const W: usize>([[[f32; 4]; 8]; W]);

/// A number for each row: those of the lane's two, the same in the four lanes that share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerRow(pub(crate) [f32; 2]);

impl PerRow {
    /// `value` for all.
    pub(crate) fn of(value: f32) -> PerRow {
        PerRow([value; 2])
    }

    /// What `f` says for each.
    pub(crate) fn each(f: impl Fn(usize) -> f32) -> PerRow {
        PerRow([f(0), f(1)])
    }

    /// Column `column` of the lane's rows; zero where there are none.
    ///
    /// # Safety
    /// The rows are there.
    pub(crate) unsafe fn read(lane: &Lane, from: &Rows<impl Fn(u32) -> Row>, column: u32) -> PerRow {
        let one = |r: u32| {
            let is_there = r < from.count && column < from.columns;
            // SAFETY: the rows' (caller).
            if is_there { unsafe { (from.row)(r).get(column) } } else { 0.0 }
        };
        PerRow([one(lane.row), one(lane.row + 8)])
    }

    /// Writes column `column` of the lane's rows, as far as there are such: one of the lanes that share them.
    ///
    /// # Safety
    /// Nobody else touches it.
    pub(crate) unsafe fn write(&self, lane: &Lane, to: &Rows<impl Fn(u32) -> Row>, column: u32) {
        let one = |r: u32, value: f32| {
            if lane.t() == 0 && r < to.count && column < to.columns {
                // SAFETY: the rows' (caller); this lane's alone.
                unsafe { (to.row)(r).set(column, value) };
            }
        };
        one(lane.row, self.0[0]);
        one(lane.row + 8, self.0[1]);
    }

    /// What the four lanes that share the rows make of theirs, the same bits in each, since `f` commutes.
    unsafe fn across(self, f: impl Fn(f32, f32) -> f32) -> PerRow {
        let mut all = self.0;
        // SAFETY: every lane of the warp is here (caller).
        unsafe {
            all[0] = f(all[0], f32::from_bits(warp::shuffle_xor(all[0].to_bits(), 1)));
            all[1] = f(all[1], f32::from_bits(warp::shuffle_xor(all[1].to_bits(), 1)));
            all[0] = f(all[0], f32::from_bits(warp::shuffle_xor(all[0].to_bits(), 2)));
            all[1] = f(all[1], f32::from_bits(warp::shuffle_xor(all[1].to_bits(), 2)));
        }
        PerRow(all)
    }
}

/// A product of 16 rows in two terms with 8 columns.
unsafe fn product(terms: [[u32; 4]; 2], b: [u32; 2], sums: [f32; 4]) -> [f32; 4] {
    // SAFETY: every lane of the warp is here (caller).
    unsafe { warp::mma(terms[1], b, warp::mma(terms[0], b, sums)) }
}

impl<const U: usize> Eights<U> {
    /// `value` everywhere.
    pub(crate) fn of(value: f32) -> Eights<U> {
        const { assert!(U >= 1 && U <= 4) };
        Eights([[[value; 4]; 4]; U])
    }

    /// The warp's rows, from column `column` on; zero where there are none.
    ///
    /// # Safety
    /// The rows are there.
    pub(crate) unsafe fn read(lane: &Lane, from: &Rows<impl Fn(u32) -> Row>, column: u32) -> Eights<U> {
        let (lane, mut all) = (&lane.anew(), Eights::of(0.0));
        each!(u in 4 below U => {
            let at = column + 32 * u as u32 + CHUNK * lane.t();
            // SAFETY: the rows' (caller).
            let halves = unsafe { eights_at(from, [(lane.row, at), (lane.row + 8, at)]) };
            all.put(u, halves);
        });
        all
    }

    /// The first row from column `column` on, for all.
    ///
    /// # Safety
    /// As [`read`](Eights::read).
    pub(crate) unsafe fn read_first(lane: &Lane, from: &Rows<impl Fn(u32) -> Row>, column: u32) -> Eights<U> {
        let (lane, mut all) = (&lane.anew(), Eights::of(0.0));
        each!(u in 4 below U => {
            // SAFETY: the row's (caller).
            let [eight] = unsafe { eights_at(from, [(0, column + 32 * u as u32 + CHUNK * lane.t())]) };
            all.put(u, [eight, eight]);
        });
        all
    }

    /// The lane's eight columns of the `u`th 32, of both rows.
    fn put(&mut self, u: usize, [a, b]: [[f32; 8]; 2]) {
        each!(j in 4 => { self.0[u][j] = [a[2 * j], a[2 * j + 1], b[2 * j], b[2 * j + 1]]; });
    }

    /// As [`add_rows`](Eights::add_rows), of `a` in registers. `C` is `4 P`.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn add_rows_of<const P: usize, const R: u32, const C: u32>(
        &mut self,
        lane: &Lane,
        a: &Eights<P>,
        b: &Tile<R, C>,
    ) {
        const { assert!(C == 4 * P as u32) };
        if !lane.is_busy {
            return;
        }
        each!(u in 4 below P => {
            // SAFETY: the caller's promises.
            unsafe { self.add_group([a.terms(u, 0), a.terms(u, 1)], lane, b, u as u32) };
        });
    }

    /// Adds a . b^T, the sums over `C` chunks: of `a` the warp's rows, of `b` all.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call; both are there: `a` split by this warp, which has met since, `b`
    /// loaded, waited for and met by all. `R` is `32 U`.
    pub(crate) unsafe fn add_rows<const R: u32, const C: u32>(&mut self, lane: &Lane, a: &Own<C>, b: &Tile<R, C>) {
        let mut group = if lane.is_busy { 0 } else { C / 4 };
        while group < C / 4 {
            memory::rolled();
            // SAFETY: the caller's promises.
            unsafe {
                self.add_group(a.terms(lane, group), lane, b, group);
            }
            // LLVM would unroll it as well.
            group = memory::opaque_word(group + 1);
        }
    }

    /// Adds a product over the `group`th 32 columns, whose terms are those of the first and the second 16 by what a
    /// lane has of them.
    unsafe fn add_group<const R: u32, const C: u32>(
        &mut self,
        terms: [[[u32; 4]; 2]; 2],
        lane: &Lane,
        b: &Tile<R, C>,
        group: u32,
    ) {
        const { assert!(R == 32 * U as u32) };
        let lane = &lane.anew();
        let base = b.base(lane.g() / 2 * 8 + lane.g() % 2, 4 * group + lane.t());
        // SAFETY: the caller's promises.
        unsafe {
            each!(u in 4 below U => {
                each!(j in 4 => {
                    let w = Tile::<R, C>::chunk(base, 32 * u as u32 + 2 * j as u32, 0);
                    self.0[u][j] = product(terms[0], [w[0], w[1]], self.0[u][j]);
                    self.0[u][j] = product(terms[1], [w[2], w[3]], self.0[u][j]);
                });
            });
        }
    }

    /// The terms of 16 of the columns, `s` of two: as a product has them.
    fn terms(&self, u: usize, s: usize) -> [[u32; 4]; 2] {
        let (a, b) = (self.0[u][2 * s], self.0[u][2 * s + 1]);
        let pairs = [in_two([a[0], a[1]]), in_two([a[2], a[3]]), in_two([b[0], b[1]]), in_two([b[2], b[3]])];
        [pairs.map(|pair| pair[0]), pairs.map(|pair| pair[1])]
    }

    /// Each number by `f`, which is told which of the lane's rows, and which column, it is of.
    pub(crate) fn map(mut self, lane: &Lane, f: impl Fn(f32, usize, u32) -> f32) -> Eights<U> {
        let first = 8 * lane.anew().t();
        each!(u in 4 below U => {
            each!(j in 4 => {
                each!(i in 4 => {
                    let column = first + 32 * u as u32 + 2 * j as u32 + i as u32 % 2;
                    self.0[u][j][i] = f(self.0[u][j][i], i / 2, column);
                });
            });
        });
        self
    }

    /// As [`map`](Eights::map), of each number and the one of `other` beside it.
    pub(crate) fn map_with(
        mut self,
        lane: &Lane,
        other: &Eights<U>,
        f: impl Fn(f32, f32, usize, u32) -> f32,
    ) -> Eights<U> {
        let first = 8 * lane.anew().t();
        each!(u in 4 below U => {
            each!(j in 4 => {
                each!(i in 4 => {
                    let column = first + 32 * u as u32 + 2 * j as u32 + i as u32 % 2;
                    self.0[u][j][i] = f(self.0[u][j][i], other.0[u][j][i], i / 2, column);
                });
            });
        });
        self
    }

    /// Of each row the largest number, none of which is NaN.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call.
    pub(crate) unsafe fn max(&self) -> PerRow {
        // SAFETY: the caller's promise.
        unsafe { self.fold(f32::NEG_INFINITY, larger).across(larger) }
    }

    /// Of each row the sum.
    ///
    /// # Safety
    /// As [`max`](Eights::max).
    pub(crate) unsafe fn sum(&self) -> PerRow {
        // SAFETY: the caller's promise.
        unsafe { self.fold(0.0, |a, b| a + b).across(|a, b| a + b) }
    }

    fn fold(&self, from: f32, f: impl Fn(f32, f32) -> f32) -> PerRow {
        let mut all = [from; 2];
        each!(u in 4 below U => {
            each!(j in 4 => {
                each!(i in 4 => { all[i / 2] = f(all[i / 2], self.0[u][j][i]); });
            });
        });
        PerRow(all)
    }
}

/// As [`where_seen`], if there are `count` columns, and of those seen, which may be more, the row sees the last
/// `window` alone, at most 2^31.
pub(crate) fn where_in_window(column: u32, seen: u32, window: u32, count: u32, value: f32) -> f32 {
    // Beyond the last that is seen it is larger than every window.
    if seen.wrapping_sub(column + 1) < window && column < count { value } else { f32::NEG_INFINITY }
}

/// `value` where the row sees column `column`, one of the first `seen`; -inf elsewhere.
pub(crate) fn where_seen(column: u32, seen: u32, value: f32) -> f32 {
    if column < seen { value } else { f32::NEG_INFINITY }
}

impl<const W: usize> Sixteens<W> {
    /// `value` everywhere.
    pub(crate) fn of(value: f32) -> Sixteens<W> {
        const { assert!(W >= 1 && W <= 2) };
        Sixteens([[[value; 4]; 8]; W])
    }

    /// Adds p . b: of p the warp's rows, in registers, and of `b` as many rows as p has columns.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call; `b` is there: loaded, waited for and met by all. `R` is `32 P`, `C`
    /// is `8 W`.
    pub(crate) unsafe fn add_columns<const P: usize, const R: u32, const C: u32>(
        &mut self,
        lane: &Lane,
        p: &Eights<P>,
        b: &Tile<R, C>,
    ) {
        if !lane.is_busy {
            return;
        }
        let lane = &lane.anew();
        let (even, odd) = (b.base(8 * lane.t(), lane.g()), b.base(8 * lane.t() + 1, lane.g()));
        // SAFETY: the caller's promises.
        unsafe {
            each!(u in 4 below P => {
                each!(s in 2 => {
                    let terms = p.terms(u, s);
                    let rows = 32 * u as u32 + 4 * s as u32;
                    each!(w in 2 below W => {
                        let chunk = |base, rows| Tile::<R, C>::chunk(base, rows, 8 * w as u32);
                        let four = [chunk(even, rows), chunk(odd, rows), chunk(even, rows + 2), chunk(odd, rows + 2)];
                        each!(c in 8 => {
                            let column = [pair_of(four[0], four[1], c), pair_of(four[2], four[3], c)];
                            self.0[w][c] = product(terms, column, self.0[w][c]);
                        });
                    });
                });
            });
        }
    }

    /// As [`Eights::map`].
    pub(crate) fn map(mut self, lane: &Lane, f: impl Fn(f32, usize, u32) -> f32) -> Sixteens<W> {
        let first = 16 * lane.anew().t();
        each!(w in 2 below W => {
            each!(c in 8 => {
                each!(i in 4 => {
                    let column = first + 64 * w as u32 + 8 * (i as u32 % 2) + c as u32;
                    self.0[w][c][i] = f(self.0[w][c][i], i / 2, column);
                });
            });
        });
        self
    }
}

/// Elements `c`, of eight each, of two neighbouring rows.
fn pair_of(first: [u32; 4], second: [u32; 4], c: usize) -> u32 {
    use crate::arch::scalar::{high_halves, low_halves};
    let halves = if c.is_multiple_of(2) { low_halves } else { high_halves };
    halves(first[c / 2], second[c / 2])
}

impl<const U: usize> Fours for Eights<U> {
    fn each_four(&self, t: u32, put: impl Fn(u32, u32, [f32; 4])) {
        each!(u in 4 below U => {
            each!(half in 2 => {
                each!(pair in 2 => {
                    let (a, b) = (self.0[u][2 * pair], self.0[u][2 * pair + 1]);
                    let four = [a[2 * half], a[2 * half + 1], b[2 * half], b[2 * half + 1]];
                    put(half as u32, 32 * u as u32 + 8 * t + 4 * pair as u32, four);
                });
            });
        });
    }
}

impl<const W: usize> Fours for Sixteens<W> {
    fn each_four(&self, t: u32, put: impl Fn(u32, u32, [f32; 4])) {
        each!(w in 2 below W => {
            each!(i in 4 => {
                each!(half in 2 => {
                    let numbers = [0, 1, 2, 3].map(|c| self.0[w][4 * half + c][i]);
                    let column = 64 * w as u32 + 16 * t + 8 * (i as u32 % 2) + 4 * half as u32;
                    put(i as u32 / 2, column, numbers);
                });
            });
        });
    }
}
