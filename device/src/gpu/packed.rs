//! Weights in fewer bits ([`perpetua_shared::dtype::Lines`]), as bodies find them: where an element of a row and its
//! scale lie, and what a word of them holds.

use super::math::bytes_less;
use super::{INT4, MX4, Q4, Q8};
use crate::arch::memory;
use crate::arch::scalar::permute;
use core::fmt::Debug;
use core::marker::PhantomData;
use perpetua_shared::dtype::{self, INT4_LEVELS, Lines, MX4_LEVELS, Q4_BLOCK, Q4_LEVELS};

/// Bytes of a line.
pub(crate) const LINE: u32 = 64;

/// A form of weights, of one type or of several that only a table tells apart: these have one code.
pub(crate) trait LookedUp: Copy {
    /// What numbers stand for, in registers, where more than one type is of this form.
    type Table: Copy;

    /// That of type `dtype`, which [is of this form](LookedUp::is_of).
    fn table(dtype: u16) -> Self::Table;

    /// Whether weights of type `dtype` are of this form.
    fn is_of(dtype: u16) -> bool;
}

/// A form of weights in fewer bits.
pub(crate) trait Packed: LookedUp {
    /// What the bytes of [`eight`](Packed::eight) are more than their numbers.
    const MORE: f32;

    /// How its rows are laid out.
    const LINES: Lines;

    /// [`Lines::row_bytes`], in the 32 bits that a GPU computes with.
    fn row_bytes(k: u32) -> u32 {
        let lines = k.div_ceil(Self::LINES.elems as u32);
        (lines + lines.div_ceil(Self::LINES.per_group as u32)) * LINE
    }

    /// [`Lines::at`], likewise.
    fn line(line: u32) -> [u32; 2] {
        let per_group = Self::LINES.per_group as u32;
        let (group, number) = (line / per_group, line % per_group);
        [(line + group + 1) * LINE, group * (per_group + 1) * LINE + number * (LINE / per_group)]
    }

    /// Stretches of sixteen elements, each with one scale, that sixteen bytes of a row are, and where stretch `which`
    /// of the `unit`th sixteen bytes begins.
    const STRETCHES: u32;
    fn stretch(unit: u32, which: u32) -> u32;

    /// Where element `i` of a row is: its byte, and its scale. Sixteen from a multiple of sixteen on are in bytes that
    /// follow, and have one scale.
    fn element(i: u32) -> (u32, u32);

    /// The scale that is at byte `at` of a row, of the aligned `word` around it.
    fn scale(word: u32, at: u32) -> f32;

    /// The numbers, scaled by nothing yet, of eight elements from `i` on, a multiple of eight, whose bytes these are:
    /// as bytes, each [so many](Packed::MORE) more, from none to 255.
    fn eight(table: Self::Table, bytes: (u32, u32), i: u32) -> (u32, u32);

    /// Element `i` of the row at `row`, of type `dtype`.
    ///
    /// # Safety
    /// The row, which begins on a line, has that element.
    unsafe fn element_of(dtype: u16, row: *const u8, i: u32) -> f32 {
        let (byte, scale) = Self::element(i);
        // SAFETY: of the row (caller).
        let word = |at: u32| unsafe { memory::load(row.wrapping_add(at as usize / 4 * 4).cast::<u32>()) };
        Self::one(Self::table(dtype), word(byte), i) * Self::scale(word(scale), scale)
    }

    /// That of element `i`, of the aligned word around its byte.
    fn one(table: Self::Table, word: u32, i: u32) -> f32 {
        let (byte, _) = Self::element(i);
        let [first, ..] = bytes_less(Self::eight(table, (word >> (byte % 4 * 8), 0), i).0, Self::MORE);
        first
    }
}

/// Weights in 8 bits, [`dtype::Q8`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Eight;

const _: () = assert!(dtype::Q8.elems as u32 == LINE, "a byte each");

impl LookedUp for Eight {
    type Table = ();

    fn table(_: u16) {}

    fn is_of(dtype: u16) -> bool {
        dtype == Q8
    }
}

impl Packed for Eight {
    const LINES: Lines = dtype::Q8;
    const MORE: f32 = 128.0;
    const STRETCHES: u32 = 1;

    fn stretch(unit: u32, _: u32) -> u32 {
        16 * unit
    }

    fn element(i: u32) -> (u32, u32) {
        let [bytes, scale] = Self::line(i / LINE);
        (bytes + i % LINE, scale)
    }

    fn scale(word: u32, _: u32) -> f32 {
        f32::from_bits(word)
    }

    fn eight((): (), (first, second): (u32, u32), _: u32) -> (u32, u32) {
        (first ^ 0x8080_8080, second ^ 0x8080_8080)
    }
}

/// Weights in 4 bits, laid out as [`dtype::Q4`] says: the lowest 64 elements of a line in the low halves of its bytes,
/// the others in the high ones. What their numbers stand for, `N` says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fours<N>(PhantomData<N>);

/// Those of any type, whose levels a table has.
pub(crate) type Four = Fours<InTable>;

/// Those of [`INT4`], which are numbers themselves: nothing is looked up.
pub(crate) type Nibbles = Fours<Plain>;

/// Elements of a line.
pub(crate) const FOUR_ELEMS: u32 = dtype::Q4.elems as u32;

const _: () = assert!(FOUR_ELEMS == 2 * LINE && Q4_BLOCK == 32, "two a byte, four scales a line");

/// What numbers of four bits stand for.
pub(crate) trait Numbering: LookedUp + Debug {
    /// What levels are raised by: so many that none is below zero.
    const RAISED: i8;

    /// The type whose rows are multiplied [where they lie](super::thin), and its table.
    const DTYPE: u16;
    const OWN: Self::Table;

    /// The levels in the low halves of eight bytes, and in the high ones, as bytes, [raised](Numbering::RAISED), in the
    /// [order](Numbering::in_order) of these.
    fn raised(table: Self::Table, bytes: (u32, u32)) -> ((u32, u32), (u32, u32));

    /// The eight elements of that order.
    fn in_order(eight: [f32; 8]) -> [[f32; 4]; 2];

    /// The levels in eight bytes, of their low halves or, where `shift` is 4, the high ones, each word's own.
    fn of_half(table: Self::Table, bytes: (u32, u32), shift: u32) -> (u32, u32);
}

/// Levels of a [table](LevelTable): so many more that none has its highest bit set, whatever it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InTable;

/// What levels are raised by in a table.
const RAISED: i8 = 64;

/// The sixteen levels of a type in 4 bits, [raised](RAISED), by fours: a byte each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LevelTable([u32; 4]);

impl LevelTable {
    const fn new(levels: [i8; 16]) -> LevelTable {
        let mut fours = [0; 4];
        let mut at = 0;
        while at < 16 {
            let raised = (levels[at] + RAISED) as u8;
            assert!(raised < 0x80);
            fours[at / 4] |= (raised as u32) << (at % 4 * 8);
            at += 1;
        }
        LevelTable(fours)
    }

    const OF_Q4: LevelTable = LevelTable::new(Q4_LEVELS);
    const OF_MX4: LevelTable = LevelTable::new(MX4_LEVELS);
    const OF_INT4: LevelTable = LevelTable::new(INT4_LEVELS);
}

/// The low halves of bytes.
const LOW: u32 = 0x0f0f_0f0f;

impl InTable {
    /// The levels of the eight numbers that a word is, four bits each, as bytes, [raised](RAISED): those of its low
    /// half first.
    fn levels(LevelTable([a, b, c, d]): LevelTable, numbers: u32) -> (u32, u32) {
        // To the first eight levels a number beyond them is a byte's sign, which none has; and so is a lower one to the
        // others, once its highest bit is the opposite.
        let beyond = numbers ^ 0x8888_8888;
        let four = |shift: u32| permute(a, b, numbers >> shift) | permute(c, d, beyond >> shift);
        (four(0), four(16))
    }
}

impl LookedUp for InTable {
    type Table = LevelTable;

    fn table(dtype: u16) -> LevelTable {
        let (LevelTable([a, b, c, d]), LevelTable([e, f, g, h])) = (LevelTable::OF_MX4, LevelTable::OF_Q4);
        let LevelTable([i, j, k, l]) = LevelTable::OF_INT4;
        // Word by word: of several tables one would be found in memory.
        let word = |mx4: u32, q4: u32, int4: u32| {
            let other = if dtype == INT4 { int4 } else { q4 };
            if dtype == MX4 { mx4 } else { other }
        };
        LevelTable([word(a, e, i), word(b, f, j), word(c, g, k), word(d, h, l)])
    }

    fn is_of(dtype: u16) -> bool {
        dtype == Q4 || dtype == MX4 || dtype == INT4
    }
}

impl Numbering for InTable {
    const RAISED: i8 = RAISED;
    const DTYPE: u16 = Q4;
    const OWN: LevelTable = LevelTable::OF_Q4;

    /// Of the first and the second byte of either word in turn, then of the third and the fourth.
    fn raised(table: LevelTable, (first, second): (u32, u32)) -> ((u32, u32), (u32, u32)) {
        let low = first & LOW | second << 4 & !LOW;
        let high = first >> 4 & LOW | second & !LOW;
        (Self::levels(table, low), Self::levels(table, high))
    }

    fn in_order([a, b, c, d, e, f, g, h]: [f32; 8]) -> [[f32; 4]; 2] {
        [[a, e, b, f], [c, g, d, h]]
    }

    fn of_half(table: LevelTable, (first, second): (u32, u32), shift: u32) -> (u32, u32) {
        let (one, other) = Self::levels(table, first >> shift & LOW | second >> shift << 4 & !LOW);
        // Each word's own, out of both in turn.
        (permute(one, other, 0x6420), permute(one, other, 0x7531))
    }
}

/// Numbers less eight, as they lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

impl LookedUp for Plain {
    type Table = ();

    fn table(_: u16) {}

    fn is_of(dtype: u16) -> bool {
        dtype == INT4
    }
}

impl Numbering for Plain {
    const RAISED: i8 = 8;
    const DTYPE: u16 = INT4;
    const OWN: () = ();

    fn raised((): (), (first, second): (u32, u32)) -> ((u32, u32), (u32, u32)) {
        ((first & LOW, second & LOW), (first >> 4 & LOW, second >> 4 & LOW))
    }

    fn in_order([a, b, c, d, e, f, g, h]: [f32; 8]) -> [[f32; 4]; 2] {
        [[a, b, c, d], [e, f, g, h]]
    }

    fn of_half((): (), (first, second): (u32, u32), shift: u32) -> (u32, u32) {
        (first >> shift & LOW, second >> shift & LOW)
    }
}

impl<N: Numbering> LookedUp for Fours<N> {
    type Table = N::Table;

    fn table(dtype: u16) -> N::Table {
        N::table(dtype)
    }

    fn is_of(dtype: u16) -> bool {
        N::is_of(dtype)
    }
}

impl<N: Numbering> Packed for Fours<N> {
    const LINES: Lines = dtype::Q4;
    const MORE: f32 = N::RAISED as f32;
    const STRETCHES: u32 = 2;

    fn stretch(unit: u32, which: u32) -> u32 {
        unit / 4 * FOUR_ELEMS + unit % 4 * 16 + which * LINE
    }

    fn element(i: u32) -> (u32, u32) {
        let [bytes, scales] = Self::line(i / FOUR_ELEMS);
        (bytes + i % LINE, scales + i % FOUR_ELEMS / Q4_BLOCK as u32 * 2)
    }

    fn scale(word: u32, at: u32) -> f32 {
        f32::from_bits(if at.is_multiple_of(4) { word << 16 } else { word & 0xffff_0000 })
    }

    fn eight(table: N::Table, bytes: (u32, u32), i: u32) -> (u32, u32) {
        N::of_half(table, bytes, i / LINE % 2 * 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perpetua_shared::dtype::q4_at;

    fn lines_are_of<P: Packed>(lines: Lines) {
        for k in 1..20_000 {
            assert_eq!(P::row_bytes(k) as usize, lines.row_bytes(k as usize));
            let last = k.div_ceil(lines.elems as u32) - 1;
            assert_eq!(P::line(last).map(|at| at as usize), lines.at(last as usize), "of {k} elements");
        }
    }

    #[test]
    fn lines_are_where_their_type_says() {
        lines_are_of::<Eight>(dtype::Q8);
        lines_are_of::<Four>(dtype::Q4);
        assert!(
            [Q4, MX4, INT4].into_iter().all(Four::is_of) && !Four::is_of(Q8) && Eight::is_of(Q8) && !Eight::is_of(MX4)
        );
        for i in 0..5000 {
            let (byte, shift, scale) = q4_at(i);
            let (found_byte, found_scale) = Four::element(i as u32);
            assert_eq!((found_byte as usize, found_scale as usize), (byte, scale), "element {i}");
            assert_eq!(shift as usize, i / 64 % 2 * 4);
        }
    }

    /// Every element of whole lines is in one stretch, whose bytes follow each other and have one scale.
    fn stretches_are_a_row<P: Packed>() {
        for k in [128, 256, 768, 2176] {
            let units = k / (16 * P::STRETCHES);
            let mut found = vec![false; (units * 16 * P::STRETCHES) as usize];
            for (unit, which) in (0..units).flat_map(|unit| (0..P::STRETCHES).map(move |which| (unit, which))) {
                let first = P::stretch(unit, which);
                let ((byte, scale), (first_byte, _)) = (P::element(first), P::element(P::stretch(unit, 0)));
                assert!(byte == first_byte && byte.is_multiple_of(16) && first + 16 <= k);
                for i in 0..16 {
                    assert_eq!(P::element(first + i), (byte + i, scale));
                    assert!(!std::mem::replace(&mut found[(first + i) as usize], true), "{} comes twice", first + i);
                }
            }
            assert!(found.iter().all(|is| *is), "of {k} elements");
        }
    }

    #[test]
    fn stretches_are_rows() {
        stretches_are_a_row::<Eight>();
        stretches_are_a_row::<Four>();
        stretches_are_a_row::<Nibbles>();
    }

    /// All numbers beside all others, in every place.
    #[test]
    fn levels_are_those_of_their_numbers() {
        for (dtype, levels) in [(Q4, Q4_LEVELS), (MX4, MX4_LEVELS), (INT4, INT4_LEVELS)] {
            levels_are_of::<InTable>(dtype, levels);
        }
        levels_are_of::<Plain>(INT4, INT4_LEVELS);
    }

    fn levels_are_of<N: Numbering>(dtype: u16, levels: [i8; 16]) {
        let table = N::table(dtype);
        for (byte, at) in (0..=255u8).flat_map(|byte| (0..8).map(move |at| (byte, at))) {
            let mut bytes: [u8; 8] = core::array::from_fn(|i| (i as u8).wrapping_mul(37) ^ byte.rotate_left(3));
            bytes[at] = byte;
            let word = |from: usize| u32::from_le_bytes(core::array::from_fn(|i| bytes[from + i]));
            let words = (word(0), word(4));
            let level = |i: usize, shift: u32| levels[usize::from(bytes[i] >> shift & 15)];
            for (shift, i) in [(0, 256), (4, 64)] {
                let (one, other) = Fours::<N>::eight(table, words, i);
                let found: Vec<f32> =
                    [one, other].into_iter().flat_map(|bytes| bytes_less(bytes, Fours::<N>::MORE)).collect();
                assert_eq!(found, core::array::from_fn::<f32, 8, _>(|i| f32::from(level(i, shift))));
                let inside = i + at as u32;
                let one = Fours::<N>::one(table, if at < 4 { words.0 } else { words.1 }, inside);
                assert_eq!(one, f32::from(level(at, shift)));
            }
            let (low, high) = N::raised(table, words);
            let order = N::in_order(core::array::from_fn(|i| i as f32)).map(|four| four.map(|i| i as usize));
            for ((one, other), shift) in [(low, 0), (high, 4)] {
                let found = [one, other].map(|word| word.to_le_bytes().map(|byte| byte as i8));
                assert_eq!(found, order.map(|four| four.map(|i| level(i, shift) + N::RAISED)));
            }
        }
    }
}
