//! Runs of elements of any float dtype, as the bodies read and write them.
//!
//! Raw, because an output may lie exactly on an input (a residual updated in place): a body reads element i of every
//! input before it writes element i of the output, and never forms references to either.

use super::simd::Simd;
use crate::io::Tensor;
use perpetua_shared::DType;

/// A run of floats with unit stride.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    base: *mut u8,
    dtype: DType,
    len: usize,
}

impl Row {
    /// Elements `at..` of `tensor`, `len` of them along its last dimension.
    ///
    /// # Panics
    /// When the run leaves the box, has gaps, or is not of floats.
    pub(crate) fn of<const N: usize>(tensor: &Tensor, at: [usize; N], len: usize) -> Row {
        let dtype = tensor.dtype();
        if len == 0 {
            return Row { base: core::ptr::NonNull::<f32>::dangling().as_ptr().cast(), dtype: DType::F32, len };
        }
        assert!(matches!(dtype, DType::F32 | DType::Bf16 | DType::F16), "a row must be of floats, not {dtype}");
        assert!(len == 1 || tensor.stride(N - 1) == 1, "a row needs unit stride");
        assert!(at[N - 1] + len <= tensor.extent(N - 1), "a row must end inside the box");
        Row { base: tensor.address(at), dtype, len }
    }

    /// `len` f32 at `base`.
    ///
    /// # Safety
    /// They are readable and writable, and stay so while the row is used.
    pub(crate) unsafe fn of_floats(base: *mut f32, len: usize) -> Row {
        Row { base: base.cast(), dtype: DType::F32, len }
    }

    /// Its elements.
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The address of its first element, when that is an f32.
    pub(crate) fn as_f32(self) -> Option<*mut f32> {
        (self.dtype == DType::F32).then_some(self.base.cast())
    }

    /// Elements `i..i + n`, `n` at most a vector; zero beyond.
    ///
    /// # Safety
    /// They are inside the row; the level exists.
    #[inline(always)]
    pub(crate) unsafe fn load<S: Simd>(self, i: usize, n: usize) -> S::F {
        debug_assert!(i + n <= self.len);
        // SAFETY: inside the row (caller), which is inside a tensor's box.
        unsafe {
            match self.dtype {
                DType::Bf16 if n == S::LANES => S::load_bf16(self.base.cast::<u16>().add(i)),
                DType::Bf16 => S::load_bf16_part(self.base.cast::<u16>().add(i), n),
                DType::F16 if n == S::LANES => S::load_f16(self.base.cast::<u16>().add(i)),
                DType::F16 => S::load_f16_part(self.base.cast::<u16>().add(i), n),
                _ if n == S::LANES => S::load(self.base.cast::<f32>().add(i)),
                _ => S::load_part(self.base.cast::<f32>().add(i), n),
            }
        }
    }

    /// Stores elements `i..i + n`, rounding to nearest even.
    ///
    /// # Safety
    /// They are inside the row, which the task may write; the level exists.
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd>(self, i: usize, n: usize, v: S::F) {
        debug_assert!(i + n <= self.len);
        // SAFETY: inside the row (caller), which is inside a tensor's box.
        unsafe {
            match self.dtype {
                DType::Bf16 if n == S::LANES => S::store_bf16(self.base.cast::<u16>().add(i), v),
                DType::Bf16 => S::store_bf16_part(self.base.cast::<u16>().add(i), v, n),
                DType::F16 if n == S::LANES => S::store_f16(self.base.cast::<u16>().add(i), v),
                DType::F16 => S::store_f16_part(self.base.cast::<u16>().add(i), v, n),
                _ if n == S::LANES => S::store(self.base.cast::<f32>().add(i), v),
                _ => S::store_part(self.base.cast::<f32>().add(i), v, n),
            }
        }
    }

    /// The row as f32: its own memory when it is, else widened into `buffer`.
    ///
    /// # Safety
    /// `buffer` has room for the row; the level exists.
    #[inline(always)]
    pub(crate) unsafe fn widened<S: Simd>(self, buffer: *mut f32) -> *const f32 {
        if let Some(own) = self.as_f32() {
            return own;
        }
        let mut i = 0;
        while i < self.len {
            let n = S::LANES.min(self.len - i);
            // SAFETY: inside the row, and inside the buffer (caller).
            unsafe {
                let v = self.load::<S>(i, n);
                store::<S>(buffer.add(i), n, v)
            }
            i += n;
        }
        buffer
    }
}

/// Whether rows along the last of `N` dimensions have no gaps.
pub(crate) fn has_unit_stride<const N: usize>(tensor: &Tensor) -> bool {
    tensor.extent(N - 1) <= 1 || tensor.stride(N - 1) == 1 || tensor.dtype().lines().is_some()
}

/// `n` f32 at `p`, at most a vector; zero beyond.
///
/// # Safety
/// They are readable; the level exists.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd>(p: *const f32, n: usize) -> S::F {
    // SAFETY: the caller's promises are the same.
    unsafe { if n == S::LANES { S::load(p) } else { S::load_part(p, n) } }
}

/// Stores `n` f32 at `p`, at most a vector.
///
/// # Safety
/// They are writable; the level exists.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(p: *mut f32, n: usize, v: S::F) {
    // SAFETY: the caller's promises are the same.
    unsafe { if n == S::LANES { S::store(p, v) } else { S::store_part(p, v, n) } }
}

/// `x` in the first `n` lanes, zero beyond.
///
/// # Safety
/// The level exists.
#[inline(always)]
pub(crate) unsafe fn lanes<S: Simd>(x: f32, n: usize) -> S::F {
    // SAFETY: the buffer is at least a vector.
    unsafe { if n == S::LANES { S::splat(x) } else { S::load_part([x; 16].as_ptr(), n) } }
}
