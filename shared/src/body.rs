//! What a generated body that stands alone is launched with.

use bytemuck::{Pod, Zeroable};

/// Its entry's name begins with this.
pub const PREFIX: &str = "perpetua_body_";

/// Operands, and other arguments, that one has at most.
pub const MAX_OPERANDS: usize = 5;
/// See [`MAX_OPERANDS`].
pub const MAX_SCALARS: usize = 2;

/// A matrix in global memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Matrix {
    /// Where it begins, a multiple of 16.
    pub address: u64,
    /// Its rows.
    pub rows: u32,
    /// Its columns, a multiple of 8.
    pub columns: u32,
    /// Elements from one row to the next, a multiple of 8.
    pub stride_elems: u32,
    /// A [`DType`](crate::DType): floats.
    pub dtype: u32,
}

/// The only parameter of a body's entry, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct BodyParams {
    /// Its operands, in the body's order.
    pub operands: [Matrix; MAX_OPERANDS],
    /// `[u32; index_len]`: the rows that its index says, one where it has none.
    pub index: u64,
    /// See [`index`](BodyParams::index).
    pub index_len: u32,
    /// How much row m sees: `seen_first + m / seen_group`.
    pub seen_first: u32,
    /// See [`seen_first`](BodyParams::seen_first); not 0.
    pub seen_group: u32,
    /// Its share, first to end.
    pub share: [u32; 2],
    /// Its other arguments.
    pub scalars: [f32; MAX_SCALARS],
    /// 0.
    pub reserved: u32,
}
