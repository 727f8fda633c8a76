//! Rope of prompts: heads of f32, and a cache of bf16, by eight pairs a lane.
//!
//! ```text
//! shared   [ weights of q's norm: d | of k's: d | row 0: cosines, d / 2, and sines | row 1: ... ]
//! lanes    as many, a power of two, as have a head's d / 2 pairs: lane l pairs 4 l to 4 l + 3 of either half of them
//! heads    of each row: of the queries, the keys and the values; what is turned and what is only appended go the same way
//! ```
//! Sines, cosines and weights are found once for all heads. A lane's sixteen elements come by four loads, the next
//! head's before this one is turned.
//!
//! Floor of a task: its bytes, of which most come from L2 and go there.

use super::{Params, TURNED, VALUES, pair, slot};
use crate::arch::{WARP, memory, scalar, shared, warp};
use crate::block::{Block, FREE_SHARED};
use crate::gpu::math::{reciprocal, rsqrt, sin_cos};
use crate::gpu::{BF16, Call, F32, Tensor};

/// Words of shared memory for the table.
const WORDS: u32 = shared::KEPT - FREE_SHARED;

/// Whether the call's heads are of f32, those of the cache of bf16, and can be taken by fours.
///
/// # Safety
/// The operands are [`Rope`](super::Rope)'s.
pub(super) unsafe fn is_for(p: &Params, call: &Call<'_>, block: &Block) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let q = call.tensor(slot::Q);
        let (d, group) = (q.extent(3), q.extent(2));
        // A thread has one frequency; a warp, or less of it, a head.
        let (is_whole, has_room) = (d.is_multiple_of(16) & p.turned_pairs.is_multiple_of(4), 3 * d <= WORDS);
        let fits = (d <= 2 * block.threads) & (d <= 16 * WARP);
        let [k, v, k_cache, v_cache] = [slot::K, slot::V, slot::K_CACHE, slot::V_CACHE].map(|slot| call.tensor(slot));
        let appends = k.is_present();
        is_whole
            && has_room & fits & (q.stride(1) == group * q.stride(2))
            && are_fours(&q, F32, [0, 2])
            && (!appends
                || are_fours(&k, F32, [0, 1])
                    && are_fours(&v, F32, [0, 1])
                    && are_fours(&k_cache, BF16, [0, 1])
                    && are_fours(&v_cache, BF16, [0, 1])
                    && v.extent(2) == d)
    }
}

/// Whether `tensor` is of `dtype` and whatever two indices of dimensions `dims` name starts on the bytes of four
/// elements.
fn are_fours(tensor: &Tensor, dtype: u16, dims: [usize; 2]) -> bool {
    let apart = tensor.stride(dims[0]) | tensor.stride(dims[1]);
    tensor.dtype() == dtype && tensor.row([]).is_aligned(4 * tensor.elem_bytes() as usize) && apart.is_multiple_of(4)
}

/// What a head is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Query,
    Key,
    Value,
}

/// A head.
#[derive(Clone, Copy)]
struct Head {
    kind: Kind,
    /// Of the rows that are done together.
    row: u32,
    from: *const u8,
    to: *mut u8,
}

/// A lane's elements as they lie, by fours: the first of its pairs' first and second, and those of the other half of
/// the pairs.
type Words = [[u32; 4]; 4];

/// Four words from `at` on.
///
/// # Safety
/// They are there, `at` is a multiple of four, and nobody writes them.
unsafe fn four(at: u32) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe { shared::load16(at) }.map(f32::from_bits)
}

/// [`Rope`](super::Rope)'s body.
///
/// # Safety
/// Every thread of the block makes this same call, and [`is_for`] is so; the cache has the rows' positions, and nobody
/// else touches these.
pub(super) unsafe fn turn_all(p: &Params, call: &Call<'_>, block: &Block) {
    // SAFETY: the caller's promise.
    let (rows, most) = unsafe {
        let q = call.tensor(slot::Q);
        (call.rows(&q), (WORDS - 2 * q.extent(3)) / q.extent(3))
    };
    let mut first = 0;
    while first < rows {
        // SAFETY: the caller's promise; the table is read by nobody any more.
        unsafe { turn_rows(p, call, block, [first, (rows - first).min(most)]) };
        first += most;
        if first < rows {
            // SAFETY: all threads are here.
            unsafe { block.sync() };
        }
    }
}

/// Those of `count` rows from `first` on.
///
/// # Safety
/// As [`turn_all`]; nobody reads the table.
unsafe fn turn_rows(p: &Params, call: &Call<'_>, block: &Block, [first, count]: [u32; 2]) {
    // Found here, not kept over all the other kernels of a worker.
    let thread = memory::opaque_word(block.thread);
    // SAFETY: the caller's promise for all; a lane has read its elements of a head before the warp meets and one of
    // them is written.
    unsafe {
        let q = call.tensor(slot::Q);
        let (heads, group, d) = (q.extent(1), q.extent(2), q.extent(3));
        let (half, queries) = (d / 2, heads * group);
        let pos = call.first_pos() + call.row_first() + first;
        // Lanes of a head, and its pairs that this one has; lanes beyond the last would have the first, and take none.
        let shift = (half / 8).next_power_of_two().trailing_zeros();
        let own = 4 * (thread & ((1 << shift) - 1));
        let (own, has_some) = if own < half / 2 { (own, true) } else { (0, false) };
        let pairs = [own, own + half / 2];
        let [[a, b], [c, e]] = pairs.map(|i| pair(i, p.turned_pairs, half));
        let (elements, places) = ([a, b, c, e], [own, own + half, own + half / 2, own + half / 2 + half]);
        let of_row = queries + if call.tensor(slot::K).is_present() { 2 * heads } else { 0 };
        let units = count * of_row;
        // Where row `i` of head `j`, of elements of `bytes`, begins, by the strides of two dimensions.
        let start = |operand: usize, bytes: u32, [i, j]: [u32; 2], dims: [usize; 2]| {
            let of = call.tensor(operand);
            let apart = dims.map(|dim| u64::from(of.stride(dim) * bytes));
            of.row([]).at(0).wrapping_add((u64::from(i) * apart[0] + u64::from(j) * apart[1]) as usize)
        };
        let find = |row: u32, n: u32| {
            if n < queries {
                let from = start(slot::Q, 4, [first + row, n], [0, 2]);
                return Head { kind: Kind::Query, row, from, to: from };
            }
            let is_key = n < queries + heads;
            let (kind, h) = if is_key { (Kind::Key, n - queries) } else { (Kind::Value, n - queries - heads) };
            let (operand, cache) = if is_key { (slot::K, slot::K_CACHE) } else { (slot::V, slot::V_CACHE) };
            let (from, to) = (start(operand, 4, [first + row, h], [0, 1]), start(cache, 2, [pos + row, h], [1, 0]));
            Head { kind, row, from, to }
        };
        let ask = |head: &Head| -> Words {
            let at = if head.kind == Kind::Value { places } else { elements };
            at.map(|at| memory::load16(head.from.wrapping_add(4 * at as usize)))
        };
        // The first head's elements are on their way while the table is made.
        let nothing = Head { kind: Kind::Value, row: 0, from: core::ptr::null(), to: core::ptr::null_mut() };
        let (mut unit, apart) = (thread >> shift, block.threads >> shift);
        let [[rows_apart, heads_apart], [mut row, mut n]] = [apart, unit].map(|unit| [unit / of_row, unit % of_row]);
        let next = |row: u32, n: u32| {
            if has_some & (row < count) {
                let head = find(row, n);
                (head, ask(&head))
            } else {
                (nothing, [[0; 4]; 4])
            }
        };
        let (mut head, mut words): (Head, Words) = next(row, n);
        let (norms, angles) = (FREE_SHARED, FREE_SHARED + 2 * d);
        table(p, call, Block { thread, ..*block }, [norms, angles], [pos, count]);
        block.sync();

        let of_weights = [slot::Q_NORM, slot::K_NORM].map(|norm| call.tensor(norm).is_present());
        let are_normed = [of_weights[0], of_weights[1], p.norms & VALUES != 0];
        let (share, is_behind) = (reciprocal(d), p.norms & TURNED != 0);
        // Whole warps.
        while unit - ((thread % WARP) >> shift) < units {
            let (is_there, of, x) = (has_some & (unit < units), head, words);
            unit += apart;
            (row, n) = (row + rows_apart, n + heads_apart);
            if n >= of_row {
                (row, n) = (row + 1, n - of_row);
            }
            (head, words) = next(row, n);
            let is_key = of.kind == Kind::Key;
            let mut x = x.map(|four| four.map(f32::from_bits));
            let mut scale = 1.0;
            if are_normed[0] | are_normed[1] | are_normed[2] {
                let squares = x.map(|[a, b, c, d]| scalar::fma(a, a, b * b) + scalar::fma(c, c, d * d));
                let (mut sum, mut mask) = ((squares[0] + squares[1]) + (squares[2] + squares[3]), 1);
                while mask >> shift == 0 {
                    sum += f32::from_bits(warp::shuffle_xor(sum.to_bits(), mask));
                    mask *= 2;
                }
                let is_normed = (of.kind == Kind::Query) & are_normed[0]
                    | is_key & are_normed[1]
                    | (of.kind == Kind::Value) & are_normed[2];
                if is_normed {
                    scale = rsqrt(sum * share + p.eps);
                }
            }
            if of.kind == Kind::Value {
                x = x.map(|four| four.map(|x| x * scale));
            } else {
                let (norm, angle) = (norms + if is_key { d } else { 0 }, angles + of.row * d);
                for n in 0..2 {
                    let (low, high) = (four(norm + elements[2 * n]), four(norm + elements[2 * n + 1]));
                    let (cos, sin) = (four(angle + pairs[n]), four(angle + half + pairs[n]));
                    for i in 0..4 {
                        let (mut a, mut b) = (x[2 * n][i] * scale, x[2 * n + 1][i] * scale);
                        if !is_behind {
                            (a, b) = (a * low[i], b * high[i]);
                        }
                        (a, b) = (a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]);
                        if is_behind {
                            (a, b) = (a * low[i], b * high[i]);
                        }
                        (x[2 * n][i], x[2 * n + 1][i]) = (a, b);
                    }
                }
            }
            warp::sync();
            if is_there && of.kind == Kind::Query {
                for n in 0..4 {
                    memory::store16(of.to.wrapping_add(4 * places[n] as usize), x[n].map(f32::to_bits));
                }
            } else if is_there {
                for n in 0..4 {
                    let [low, high] = [[x[n][0], x[n][1]], [x[n][2], x[n][3]]]
                        .map(|[a, b]| u64::from(scalar::f32_to_bf16_pair(a, b)));
                    memory::store(of.to.wrapping_add(2 * places[n] as usize).cast::<u64>(), low | high << 32);
                }
            }
        }
    }
}

/// Makes the table of `count` rows, the first at position `pos`: the norms' weights, 1 where there are none, and what
/// turns pairs.
///
/// # Safety
/// As [`turn_rows`].
unsafe fn table(p: &Params, call: &Call<'_>, block: Block, [norms, angles]: [u32; 2], [pos, count]: [u32; 2]) {
    // SAFETY: the caller's promise; a thread writes its own words.
    unsafe {
        let (frequencies, d) = (call.tensor(slot::FREQUENCIES), call.tensor(slot::Q).extent(3));
        let half = d / 2;
        // Threads beyond the last whole row have none.
        let (i, of, apart) = (block.thread % half, block.thread / half, block.threads / half);
        let mut row = if of < apart { of } else { count };
        let frequency = frequencies.row([]).get(i);
        for at in block.mine(d) {
            let both = [slot::Q_NORM, slot::K_NORM].map(|norm| call.tensor(norm));
            let asked = both.map(|norm| if norm.is_present() { norm.row([]).words([at]) } else { [0] });
            let word = norms + at;
            for n in 0..2 {
                let [weight] = if both[n].is_present() { both[n].row([]).floats(asked[n]) } else { [1.0] };
                shared::store(word + n as u32 * d, weight.to_bits());
            }
        }
        let factor = if i < p.turned_pairs { p.factor } else { 1.0 };
        while row < count {
            let (sin, cos) = sin_cos((pos + row) as f32 * frequency);
            let word = angles + row * d + i;
            shared::store(word, (cos * factor).to_bits());
            shared::store(word + half, (sin * factor).to_bits());
            row += apart;
        }
    }
}
