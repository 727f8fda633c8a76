//! Weights in registers: a task's first rows, taken from their tiles while the row of activations is on its way.

use super::super::tiles::Tiles;
use super::taken::Taken;
use super::{CHUNK, CHUNK_BYTES, CHUNK_WORDS, SQUARES, TERMS, activations, room, sum_of};
use crate::arch::{bulk, shared, warp};
use crate::block::Block;
use perpetua_shared::launch::TASK_THREADS;

/// Of how many times eight rows weights are held, at most.
const GROUPS: usize = 6;

/// How many times eight rows those are where `C` products of each are the warp's, of `held` in all.
const fn groups(held: usize, chunks: usize) -> usize {
    if held / chunks < GROUPS { held / chunks } else { GROUPS }
}

/// The widest that `H` of [`Held`] is.
const MOST: usize = 30;

/// Whether sums of all rows that are held have room where a warp has `chunks` of them.
const fn is_room(chunks: usize) -> bool {
    const WARPS: u32 = TASK_THREADS / 32;
    8 * groups(MOST, chunks) as u32 <= room(TERMS + chunks as u32 * WARPS * CHUNK + SQUARES, WARPS)
}

const _: () = assert!(is_room(2) && is_room(5) && is_room(10) && is_room(14), "what is held has room");

/// Calls `$held.$what::<C>($args)` for a `C` that is at least `$width`, how many chunks of k a warp has: constant, since
/// registers have no numbers that are found out. Where they would be too many it is `$else`.
macro_rules! of_width {
    ($width:expr, $held:ident.$what:ident($($args:expr),*), $else:expr) => {
        match $width {
            0..=2 => $held.$what::<2>($($args),*),
            3..=5 => $held.$what::<5>($($args),*),
            6..=10 => $held.$what::<10>($($args),*),
            11..=14 => $held.$what::<14>($($args),*),
            _ => $else,
        }
    };
}

/// A task's first rows of weights, in registers: read while the row that they are multiplied with is on its way, so that what is left
/// to do once it is there are products. Their tiles are released by then, so the loader is ahead by that much, too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held<const N: usize, const H: usize> {
    /// Sixteen bytes a lane for each product: of eight rows of one matrix after the other, by chunks of the warp.
    weights: [[u32; 4]; H],
    /// How many rows of each matrix.
    pub(super) rows: u32,
    /// The tiles at hand by then.
    pub(super) taken: Taken<N>,
}

/// Where the calling warp's chunks are of eight rows of weights: a lane's, in its row, an odd row at one half of a pair of chunks while
/// the even one is at the other.
#[inline(always)]
fn chunk_of(c: usize, parity: u32, block: &Block) -> u32 {
    // Every other one is as many even chunks further on.
    let (warp, warps) = (block.warp(), block.warps());
    ((warp + c as u32 % 2 * warps) ^ parity) + c as u32 / 2 * 2 * warps
}

impl<const N: usize, const H: usize> Held<N, H> {
    /// Takes the first rows' tiles, of rows of `k`, and waits for them: no weights depend on the row.
    ///
    /// # Safety
    /// As [`run`](super::run).
    #[inline(always)]
    pub(super) unsafe fn new(tiles: &Tiles<'_>, k: u32, block: &Block) -> Held<N, H> {
        const { assert!(H <= MOST) };
        let mut held = Held { weights: [[0; 4]; H], rows: 0, taken: Taken::none(k) };
        // SAFETY: the caller's promise.
        unsafe { of_width!((k / CHUNK).div_ceil(block.warps()), held.fill(tiles, k, block), ()) };
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
            let (g, t) = (block.lane() / 4, block.lane() % 4);
            let mut from = [0; C];
            each!(chunk c below C => {
                let chunk = chunk_of(c, g % 2, block);
                from[c] = if chunk < k / CHUNK { chunk } else { 0 } * CHUNK_BYTES + 16 * t;
            });
            each!(group j below groups(H, C) / N => { self.fill_group(tiles, &from, j, k, g) });
        }
    }

    /// Likewise of the `j`th eight rows of each matrix, if so many are held: those of row `g` of them, from these bytes of it on.
    ///
    /// # Safety
    /// As [`run`](super::run).
    #[inline(always)]
    unsafe fn fill_group<const C: usize>(&mut self, tiles: &Tiles<'_>, from: &[u32; C], j: usize, k: u32, g: u32) {
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
                    let row = (self.taken.done + g - read) * 2 * k;
                    for i in 0..N {
                        each!(chunk c below C => {
                            self.weights[(j * N + i) * C + c] = bulk::load16(self.taken.at[i] + row + from[c]);
                        });
                    }
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
        let chunks = k / CHUNK;
        // SAFETY: the caller's promise.
        unsafe {
            let width = chunks.div_ceil(block.warps());
            of_width!(width, self.products(own, chunks, squares, block), warp::sum(squares))
        }
    }

    /// [`multiply`](Held::multiply), of `C` chunks.
    ///
    /// # Safety
    /// As [`run`](super::run).
    #[inline(always)]
    unsafe fn products<const C: usize>(&self, own: u32, chunks: u32, squares: f32, block: &Block) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let (b_at, parity) = activations(chunks, block);
            let mut b = [[0; 2]; C];
            each!(chunk c below C => {
                let chunk = chunk_of(c, parity, block);
                let is_there = chunk_of(c, 0, block) < chunks;
                let words = shared::load8(b_at + if is_there { chunk } else { 0 } * CHUNK_WORDS);
                b[c] = if is_there { words } else { [0; 2] };
            });
            // All groups', whether they have rows or not: a branch would be waited for, and so would each group's products alone.
            let mut sums = [[[0f32; 4]; 2]; GROUPS];
            each!(group j below groups(H, C) / N * N => {
                each!(chunk c below C => {
                    sums[j][c % 2] = warp::mma(self.weights[j * C + c], b[c], sums[j][c % 2]);
                });
            });
            let squares = warp::sum(squares);
            let mut own_sums = [0f32; GROUPS];
            each!(group j below groups(H, C) / N * N => { own_sums[j] = sum_of(sums[j]) });
            let (g, t) = (block.lane() / 4, block.lane() % 4);
            if t == g % 2 {
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
