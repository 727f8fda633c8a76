//! Generated bodies that no macro kernel has, each as an entry of its own: what `perpetua::codegen` can say, compiled, judged by ptxas and
//! run. A kernel's own stand beside it (`attention/flash.rs`).
//!
//! They are no part of the persistent kernel: nothing but tests launches them.

mod attention;
mod products;
mod rows;

use super::Row;
use super::tile::{Index, Rows};
use crate::arch::memory;
use crate::block::Block;
use perpetua_shared::body::{BodyParams, Matrix};

/// What an entry was launched with, as bodies want it.
#[derive(Clone, Copy)]
struct Operands<'a> {
    params: &'a BodyParams,
}

impl Operands<'_> {
    fn rows(&self, at: usize) -> Rows<impl Fn(u32) -> Row> {
        let Matrix { address, rows, columns, stride_elems, dtype } = self.params.operands[at];
        let first = Row { base: core::ptr::with_exposed_provenance_mut(address as usize), dtype: dtype as u16 };
        Rows { row: move |r| first.after(u64::from(r) * u64::from(stride_elems)), count: rows, columns }
    }

    /// # Safety
    /// The index is there.
    unsafe fn index(&self) -> Index<impl Fn(u32) -> u32> {
        let words = core::ptr::with_exposed_provenance::<u32>(self.params.index as usize);
        // SAFETY: below its length, as far as a body has rows (caller).
        Index { of: move |at| unsafe { memory::load(words.add(at as usize)) }, count: self.params.index_len }
    }

    /// Numbers of which LLVM knows nothing: it would copy them from the parameter as one piece, through local memory.
    fn share(&self) -> [u32; 2] {
        let [first, end] = self.params.share;
        [memory::opaque_word(first), memory::opaque_word(end)]
    }

    fn seen(&self) -> impl Fn(u32) -> u32 {
        let [first, group] = [self.params.seen_first, self.params.seen_group];
        move |m| first + m / group
    }
}

/// Bodies by name, and their entries.
macro_rules! bodies {
    ($($name:ident: |$operands:ident, $block:ident| $call:expr),* $(,)?) => {
        $(unsafe fn $name($operands: Operands<'_>, $block: &Block) {
            // SAFETY: the operands are as the body wants them, and every thread is here (caller).
            unsafe { $call }
        })*

        /// Their names, in their order.
        #[cfg(not(target_arch = "nvptx64"))]
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];

        /// Runs the body called `name` on a simulated GPU.
        ///
        /// # Safety
        /// Every thread of a block makes this same call, in a launch with room for the tiles; the operands are as the body wants them.
        ///
        /// # Panics
        /// There is none of that name.
        #[cfg(not(target_arch = "nvptx64"))]
        pub unsafe fn run(name: &str, params: &BodyParams) {
            let (operands, block) = (Operands { params }, Block::here());
            match name {
                // SAFETY: the caller's promise.
                $(stringify!($name) => unsafe { $name(operands, &block) },)*
                _ => panic!("there is no body {name}"),
            }
        }

        #[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
        mod entries {
            use super::*;
            $(const _: () = {
                /// # Safety
                /// As `run` on the host.
                #[unsafe(export_name = concat!("perpetua_body_", stringify!($name)))]
                unsafe extern "ptx-kernel" fn entry(params: BodyParams) {
                    let block = Block::here();
                    // SAFETY: the caller's promise.
                    unsafe { $name(Operands { params: &params }, &block) }
                }
            };)*
        }
    };
}

bodies! {
    back_to_back: |of, block| products::back_to_back(block, &of.rows(0), &of.rows(1), &of.rows(2), &of.rows(3)),
    normed_linear: |of, block| {
        let [mean, eps] = of.params.scalars;
        products::normed_linear(block, &of.rows(0), &of.rows(1), &of.rows(2), &of.rows(3), mean, eps)
    },
    gated_mlp: |of, block| {
        products::gated_mlp(block, &of.rows(0), &of.rows(1), &of.rows(2), &of.rows(3), &of.rows(4))
    },
    attend_share_64: |of, block| {
        let (scale, pages) = (of.params.scalars[0], &of.index());
        let (q, k, v, found) = (&of.rows(0), &of.rows(1), &of.rows(2), &of.rows(3));
        attention::attend_share_64(block, q, k, v, found, pages, of.seen(), of.share(), scale)
    },
    attend_share_128: |of, block| {
        let (scale, pages) = (of.params.scalars[0], &of.index());
        let (q, k, v, found) = (&of.rows(0), &of.rows(1), &of.rows(2), &of.rows(3));
        attention::attend_share_128(block, q, k, v, found, pages, of.seen(), of.share(), scale)
    },
    merge_64: |of, block| attention::merge_64(block, &of.rows(0), &of.rows(1)),
    merge_128: |of, block| attention::merge_128(block, &of.rows(0), &of.rows(1)),
    gather: |of, block| rows::gather(block, &of.rows(0), &of.rows(1), &of.index()),
    scatter: |of, block| rows::scatter(block, &of.rows(0), &of.rows(1), &of.index()),
}
