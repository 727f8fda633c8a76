//! Weights in registers: a task's first rows, taken from their tiles while the row of activations is on its way.

use super::super::tiles::Tiles;
use super::taken::Taken;
use super::{Brain, Column, Eight, Form, Four, SQUARES, TERMS, room};
use crate::arch::{shared, warp};
use crate::block::Block;
use perpetua_shared::launch::TASK_THREADS;

/// Of how many times eight rows weights are held, at most.
const GROUPS: usize = 6;

/// How many times eight rows those are where `C` products of each are the warp's, of `held` in all.
const fn groups(held: usize, chunks: usize) -> usize {
    if held / chunks < GROUPS { held / chunks } else { GROUPS }
}

/// Whether sums of all rows that are held have room where a warp has `chunks` of them.
const fn is_room<F: Form>(chunks: usize) -> bool {
    const WARPS: u32 = TASK_THREADS / 32;
    let (of_warps, longest) = (chunks as u32 * WARPS, F::LONGEST / F::CHUNK);
    let terms = if of_warps < longest { of_warps } else { longest } * F::CHUNK_TERMS;
    8 * groups(F::MOST_HELD, chunks) as u32 <= room(TERMS + terms + SQUARES, WARPS)
}

const _: () = {
    assert!(
        is_room::<Brain>(2) && is_room::<Brain>(5) && is_room::<Brain>(10) && is_room::<Brain>(14),
        "room for bf16"
    );
    assert!(
        is_room::<Eight>(2) && is_room::<Eight>(3) && is_room::<Eight>(5) && is_room::<Eight>(7),
        "room for 8 bits"
    );
    assert!(is_room::<Eight>(10) && is_room::<Eight>(14), "room for long rows in 8 bits");
    assert!(is_room::<Four>(2) && is_room::<Four>(3) && is_room::<Four>(5), "room for 4 bits");
};

/// Calls `$held.$what::<C>($args)` for a `C` that is at least `$width`, how many chunks of k a warp has: constant, since
/// registers have no numbers that are found out. Where they would be too many it is `$else`.
macro_rules! of_width {
    ($width:expr, $held:ident.$what:ident($($args:expr),*), $else:expr) => {
        match $width {
            0..=2 => $held.$what::<2>($($args),*),
            // Of rows in fewer bits a warp has fewer chunks, so that one more is more to hold.
            3 if F::CHUNK > 32 => $held.$what::<3>($($args),*),
            6..=7 if F::CHUNK == 64 => $held.$what::<7>($($args),*),
            3..=5 => $held.$what::<5>($($args),*),
            6..=10 if F::CHUNK < 128 => $held.$what::<10>($($args),*),
            11..=14 if F::CHUNK < 128 => $held.$what::<14>($($args),*),
            _ => $else,
        }
    };
}

/// A task's first rows of weights, in registers: read while the row that they are multiplied with is on its way, so that what is left
/// to do once it is there are products. Their tiles are released by then, so the loader is ahead by that much, too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held<F: Form, const N: usize, const H: usize> {
    /// Sixteen bytes a lane for each product: of eight rows of one matrix after the other, by chunks of the warp.
    weights: [F::Weights; H],
    /// How many rows of each matrix.
    pub(super) rows: u32,
    /// The tiles at hand by then.
    pub(super) taken: Taken<N>,
}

/// The calling warp's `c`th chunk.
#[inline(always)]
fn chunk_of(c: usize, block: &Block) -> u32 {
    block.warp() + c as u32 * block.warps()
}

/// The other one of its pair, if `parity` is 1.
#[inline(always)]
fn other_of(c: usize, parity: u32, block: &Block) -> u32 {
    // Every other one is as many even chunks further on.
    (chunk_of(c % 2, block) ^ parity) + c as u32 / 2 * 2 * block.warps()
}

impl<F: Form, const N: usize, const H: usize> Held<F, N, H> {
    /// Takes the first rows' tiles, of rows of `k`, and waits for them: no weights depend on the row.
    ///
    /// # Safety
    /// As [`run`](super::run).
    #[inline(always)]
    pub(super) unsafe fn new(tiles: &Tiles<'_>, k: u32, block: &Block) -> Held<F, N, H> {
        const { assert!(H <= F::MOST_HELD) };
        let mut held = Held { weights: [F::NO_WEIGHTS; H], rows: 0, taken: Taken::none(F::row_bytes(k)) };
        // SAFETY: the caller's promise.
        unsafe { of_width!((k / F::CHUNK).div_ceil(block.warps()), held.fill(tiles, k, block), ()) };
        held
    }

    /// Reads what `C` chunks of the first rows want.
    ///
    /// # Safety
    /// As [`run`](super::run).
    #[inline(always)]
    unsafe fn fill<const C: usize>(&mut self, tiles: &Tiles<'_>, k: u32, block: &Block) {
        // SAFETY: the caller's promise. Instead of a chunk beyond the last it is the first, which is multiplied with nothing.
        unsafe {
            let own = (block.lane() / 4 % 2) & F::swap(k);
            let mut places = [F::place(0); C];
            each!(chunk c below C => {
                let chunk = other_of(c, own, block);
                places[c] = F::place(if chunk < k / F::CHUNK { chunk } else { 0 });
            });
            each!(group j below groups(H, C) / N => { self.fill_group(tiles, &places, j, k, block) });
        }
    }

    /// Likewise of the `j`th eight rows of each matrix, if so many are held: a lane's chunks, which are at these places of its row.
    ///
    /// # Safety
    /// As [`run`](super::run).
    #[inline(always)]
    unsafe fn fill_group<const C: usize>(
        &mut self,
        tiles: &Tiles<'_>,
        places: &[F::Place; C],
        j: usize,
        k: u32,
        block: &Block,
    ) {
        let g = block.lane() / 4;
        let mut read = 0;
        // SAFETY: the caller's promise.
        unsafe {
            while read < 8 && (self.taken.done < self.taken.rows || tiles.left() >= N as u32) {
                let oldest = self.taken.oldest(tiles);
                if self.taken.done == self.taken.rows {
                    self.taken.take(tiles);
                }
                let here = (8 - read).min(self.taken.rows - self.taken.done);
                if g.wrapping_sub(read) < here {
                    let row = (self.taken.done + g - read) * F::row_bytes(k) + F::lane_at(block);
                    each!(unit i below N => {
                        each!(chunk c below C => {
                            self.weights[(j * N + i) * C + c] = F::load(self.taken.at[i] + row, places[c]);
                        });
                    });
                }
                read += here;
                self.taken.done += here;
                self.taken.release(tiles, oldest);
            }
        }
        self.rows += read;
    }

    /// Gives back what has been taken and not released.
    ///
    /// # Safety
    /// As [`Tiles::release_some`].
    #[inline(always)]
    pub(super) unsafe fn release(&self, tiles: &Tiles<'_>) {
        let first = self.taken.oldest(tiles);
        // SAFETY: the caller's promise.
        unsafe { tiles.release_some(first, tiles.next().wrapping_sub(first)) };
    }

    /// Puts what the calling warp's chunks add to the sums of all rows held into shared memory, from word `own` on, for rows of `k`;
    /// and adds up `squares` over the warp meanwhile.
    ///
    /// # Safety
    /// As [`run`](super::run).
    #[inline(always)]
    pub(super) unsafe fn multiply(&self, own: u32, k: u32, squares: f32, block: &Block) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let width = (k / F::CHUNK).div_ceil(block.warps());
            of_width!(width, self.products(own, k, squares, block), warp::sum(squares))
        }
    }

    /// [`multiply`](Held::multiply), of `C` chunks.
    ///
    /// # Safety
    /// As [`run`](super::run).
    #[inline(always)]
    unsafe fn products<const C: usize>(&self, own: u32, k: u32, squares: f32, block: &Block) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let (column, chunks) = (Column::of::<F>(k, block), k / F::CHUNK);
            let mut b = [F::values(&column, chunk_of(0, block), chunks); C];
            each!(chunk c below C => {
                if c > 0 {
                    b[c] = F::values(&column, chunk_of(c, block), chunks);
                }
            });
            // All groups', whether they have rows or not: a branch would be waited for, and so would each group's products alone.
            let mut sums = [[F::ZERO; 2]; GROUPS];
            each!(group j below groups(H, C) / N * N => {
                each!(chunk c below C => {
                    sums[j][c % 2] = F::add(sums[j][c % 2], self.weights[j * C + c], b[c]);
                });
            });
            let squares = warp::sum(squares);
            let mut own_sums = [0f32; GROUPS];
            each!(group j below groups(H, C) / N * N => { own_sums[j] = F::total(sums[j], block) });
            let (g, t) = (block.lane() / 4, block.lane() % 4);
            if t == column.own {
                each!(group j below groups(H, C) / N * N => {
                    let row = 8 * (j / N) as u32 + g;
                    if row < self.rows {
                        shared::store(own + row * N as u32 + (j % N) as u32, own_sums[j].to_bits());
                    }
                });
            }
            squares
        }
    }
}
