//! Weights as products take them: where they lie, or made of what lies there.

use super::{TILE_ROWS, Weights};
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{BrainRow, Pairs, STEP, Vectors, Widened};
use crate::cpu::simd::{Dot, Simd};
use core::marker::PhantomData;

/// How the weights of a product come to be multiplied.
pub(crate) trait Supply<S: Simd> {
    /// Storage of a weight of the matrix.
    type Elem: Copy;
    /// What multiplies them.
    type Dot: Dot<S>;

    /// f32 of the room that a row of `k` elements is made in; 0 where rows are multiplied where they lie.
    fn room(k: usize) -> usize;

    /// `part`, as it is multiplied.
    ///
    /// # Safety
    /// The weights are readable, rows in whole lines where they have lines; `room` is writable as far as the rows need
    /// it; the level exists.
    unsafe fn made(part: &Weights<Self::Elem>, room: *mut f32) -> Weights<<Self::Dot as Dot<S>>::Elem>;

    /// Asks for the first weights of `part`: the activations are packed while they come.
    ///
    /// # Safety
    /// The level exists.
    unsafe fn ask(part: &Weights<Self::Elem>);
}

/// Weights where they lie.
pub(crate) struct InPlace<D>(PhantomData<D>);

impl<S: Simd, D: Dot<S>> Supply<S> for InPlace<D> {
    type Elem = D::Elem;
    type Dot = D;

    fn room(_: usize) -> usize {
        0
    }

    unsafe fn made(part: &Weights<D::Elem>, _: *mut f32) -> Weights<D::Elem> {
        *part
    }

    unsafe fn ask(part: &Weights<D::Elem>) {
        let lines = (part.k / D::LINE_ELEMS).min(D::AHEAD_LINES);
        for line in 0..lines {
            for j in 0..TILE_ROWS.min(part.all_rows()) {
                // SAFETY: any address may be asked for.
                unsafe { D::prefetch(part.row(j).0, line) };
            }
        }
    }
}

/// Weights in fewer bits made bf16, times their scales and rounded, for [`Pairs`].
#[cfg(target_arch = "x86_64")]
pub(crate) struct AsPairs<E>(PhantomData<E>);

#[cfg(target_arch = "x86_64")]
impl<E: Widened> Supply<Vectors> for AsPairs<E>
where
    E::Elem: Copy,
{
    type Elem = E::Elem;
    type Dot = Pairs;

    fn room(k: usize) -> usize {
        k.next_multiple_of(STEP) / 2
    }

    unsafe fn made(part: &Weights<E::Elem>, room: *mut f32) -> Weights<u16> {
        let (stride, rows) = (part.k.next_multiple_of(STEP), part.all_rows());
        let first: *mut u16 = room.cast();
        let base = [first, if part.paired { first.wrapping_add(part.rows * stride) } else { first }];
        for j in 0..rows {
            let (matrix, i) = (j / part.rows, j % part.rows);
            let row = part.base[matrix].wrapping_add(i * part.stride[matrix]);
            // SAFETY: rows of whole lines are rows of whole steps; the room is large enough (caller).
            unsafe { Pairs::call(BrainRow::<E> { row, k: part.k, to: base[matrix].add(i * stride) }) };
        }
        let base = base.map(<*mut u16>::cast_const);
        Weights { base, stride: [stride; 2], rows: part.rows, paired: part.paired, k: part.k }
    }

    // Rows are read one after the other, as the hardware expects.
    unsafe fn ask(_: &Weights<E::Elem>) {}
}
