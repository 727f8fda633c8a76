//! Tensors as the CPU bodies and references see them: a base address, a dtype and a strided box.

use half::{bf16, f16};
use perpetua_shared::dtype::{Q8, q4_at};
use perpetua_shared::limits::MAX_RANK;
use perpetua_shared::task::Operand;
use perpetua_shared::{DType, Step, TaskDesc};

/// A tensor region in memory. Element accesses are checked against its extents; that those extents lie inside a live
/// allocation which nobody else writes meanwhile is the promise made at [`Tensor::new`].
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    base: *mut u8,
    /// Where each part along the first dimension starts, if they lie apart; else null.
    parts: *const *mut u8,
    dtype: Option<DType>,
    extent: [usize; MAX_RANK],
    stride: [usize; MAX_RANK],
}

impl Tensor {
    /// An operand that is absent.
    pub const ABSENT: Tensor = Tensor {
        base: core::ptr::null_mut(),
        parts: core::ptr::null(),
        dtype: None,
        extent: [0; MAX_RANK],
        stride: [0; MAX_RANK],
    };

    /// The box `operand` of the memory at `base`.
    ///
    /// # Safety
    /// The box lies inside one allocation that `base` points to the start of, and is aligned for its dtype; while the
    /// tensor is in use nobody writes what it reads and nobody touches what it writes. For tasks of an image the first
    /// two are rules of `image::check`, the last is law 1 (every overlap ordered).
    pub unsafe fn new(base: *mut u8, operand: &Operand) -> Tensor {
        if !operand.is_present() {
            return Tensor::ABSENT;
        }
        Tensor {
            // SAFETY: the offset is inside the allocation (caller).
            base: unsafe { base.add(operand.offset_bytes as usize) },
            parts: core::ptr::null(),
            dtype: operand.dtype(),
            extent: operand.extent.map(|n| n as usize),
            stride: operand.stride_elems.map(|n| n as usize),
        }
    }

    /// The box `operand` of matrices that lie apart, one in each of `parts` of `part_bytes`: a stack of rank 3 that,
    /// were they one after the other, would begin in the first of them.
    ///
    /// # Safety
    /// As [`Tensor::new`], of each matrix in its part; `parts` outlives the tensor.
    ///
    /// # Panics
    /// When the box is not of that kind, or leaves the parts.
    pub unsafe fn of_parts(parts: &[*mut u8], part_bytes: usize, operand: &Operand) -> Tensor {
        let elem = operand.dtype().map_or(0, DType::size_bytes);
        let [n_parts, apart] = [operand.extent[0] as usize, operand.stride_elems[0] as usize * elem];
        let [_, n, k, _] = operand.extent;
        let matrix = Operand { extent: [1, n, k, 1], ..*operand };
        let end = operand.offset_bytes.saturating_add(matrix.span_bytes());
        assert!(
            operand.rank == 3 && n_parts <= parts.len() && apart == part_bytes && end <= part_bytes as u64,
            "a box of {} parts of {part_bytes} bytes: {operand:?}",
            parts.len()
        );
        let mut tensor = Tensor::ABSENT;
        if let Some(first) = parts.first() {
            // SAFETY: the first part has the box's first matrix (caller).
            tensor = unsafe { Tensor::new(*first, operand) };
            tensor.parts = parts.as_ptr();
            // What is not taken through the table is the first part's.
            tensor.stride[0] = 0;
        }
        tensor
    }

    /// The tensor that is at `number` along the first dimension.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn part(&self, number: usize) -> Tensor {
        let mut part = Tensor { base: self.address([number]), parts: core::ptr::null(), ..*self };
        part.extent.rotate_left(1);
        part.stride.rotate_left(1);
        (part.extent[MAX_RANK - 1], part.stride[MAX_RANK - 1]) = (1, 0);
        part
    }

    /// Whether there is a tensor.
    pub fn is_present(&self) -> bool {
        self.dtype.is_some()
    }

    /// The element type; `U8` for an absent tensor, which has no elements.
    pub fn dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::U8)
    }

    /// Elements along dimension `dim`.
    pub fn extent(&self, dim: usize) -> usize {
        self.extent[dim]
    }

    /// Elements between neighbours along dimension `dim`.
    pub fn stride(&self, dim: usize) -> usize {
        self.stride[dim]
    }

    /// The address of the element at `at`.
    ///
    /// # Panics
    /// When an index is not below its extent.
    pub fn address<const N: usize>(&self, at: [usize; N]) -> *mut u8 {
        let mut offset = 0;
        for (dim, i) in at.into_iter().enumerate() {
            assert!(i < self.extent[dim], "index {i} of dimension {dim} is not below {}", self.extent[dim]);
            offset += i * self.stride[dim];
        }
        // SAFETY: each index is below its extent, so the element is inside the box, hence the allocation; parts are as
        // many as the first extent says, and of each the box has what it has of the first.
        unsafe {
            let mut base = self.base;
            if !self.parts.is_null() {
                base = (*self.parts.add(at[0])).add(self.base.offset_from_unsigned(*self.parts));
            }
            base.add(offset * self.dtype().size_bytes())
        }
    }

    /// The element at `at`, widened to f32. Integers convert.
    pub fn get<const N: usize>(&self, at: [usize; N]) -> f32 {
        let p = self.address(at);
        // SAFETY: `address` checked the index; alignment is the constructor's promise. A row of lines is whole (the
        // rule of the kernels that take it): `p` is its start, from where elements and scales are counted.
        unsafe {
            match self.dtype() {
                DType::F32 => p.cast::<f32>().read(),
                DType::Bf16 => p.cast::<bf16>().read().to_f32(),
                DType::F16 => p.cast::<f16>().read().to_f32(),
                DType::I32 => p.cast::<i32>().read() as f32,
                DType::U32 => p.cast::<u32>().read() as f32,
                DType::U8 => p.read() as f32,
                DType::I64 => p.cast::<i64>().read() as f32,
                DType::Q8 => {
                    let column = at[N - 1];
                    let [bytes, scale] = Q8.at(column / Q8.elems);
                    let byte = p.add(bytes + column % Q8.elems).cast::<i8>().read();
                    f32::from(byte) * p.add(scale).cast::<f32>().read()
                }
                dtype @ (DType::Q4 | DType::Mx4 | DType::Int4) => {
                    let (byte, shift, scale) = q4_at(at[N - 1]);
                    let number = usize::from(p.add(byte).read() >> shift & 15);
                    let level = dtype.levels().map_or(0, |levels| levels[number]);
                    f32::from(level) * p.add(scale).cast::<bf16>().read().to_f32()
                }
            }
        }
    }

    /// Sets the element at `at`, rounding `value` to the dtype (to nearest even for the 16-bit floats).
    pub fn set<const N: usize>(&self, at: [usize; N], value: f32) {
        let p = self.address(at);
        // SAFETY: as in `get`; that this task may write here is the constructor's promise.
        unsafe {
            match self.dtype() {
                DType::F32 => p.cast::<f32>().write(value),
                DType::Bf16 => p.cast::<bf16>().write(bf16::from_f32(value)),
                DType::F16 => p.cast::<f16>().write(f16::from_f32(value)),
                DType::I32 => p.cast::<i32>().write(value as i32),
                DType::U32 => p.cast::<u32>().write(value as u32),
                DType::U8 => p.write(value as u8),
                DType::I64 => p.cast::<i64>().write(value as i64),
                DType::Q8 | DType::Q4 | DType::Mx4 | DType::Int4 => {
                    panic!("weights in {} are never written by a task", self.dtype())
                }
            }
        }
    }

    /// The i32 at `at` of an `I32` tensor.
    pub fn get_i32<const N: usize>(&self, at: [usize; N]) -> i32 {
        assert_eq!(self.dtype(), DType::I32);
        // SAFETY: checked index, right dtype.
        unsafe { self.address(at).cast::<i32>().read() }
    }

    /// Sets the i32 at `at` of an `I32` tensor.
    pub fn set_i32<const N: usize>(&self, at: [usize; N], value: i32) {
        assert_eq!(self.dtype(), DType::I32);
        // SAFETY: checked index, right dtype.
        unsafe { self.address(at).cast::<i32>().write(value) }
    }

    /// `len` contiguous elements from `at` on, as a slice of `T`.
    ///
    /// # Panics
    /// When `T` is not the dtype's size, the last dimension's stride is not 1, or the run leaves the box.
    pub fn slice<T: Element, const N: usize>(&self, at: [usize; N], len: usize) -> &[T] {
        let p = self.run_of::<T, N>(at, len);
        // SAFETY: `run_of` checked that the run is in the box and of this dtype; see `Tensor::new` for writers.
        unsafe { core::slice::from_raw_parts(p, len) }
    }

    /// As [`Tensor::slice`], to write.
    #[allow(clippy::mut_from_ref)]
    pub fn slice_mut<T: Element, const N: usize>(&self, at: [usize; N], len: usize) -> &mut [T] {
        let p = self.run_of::<T, N>(at, len);
        // SAFETY: as `slice`; the task is the only one that touches what it writes, and kernels take each run once.
        unsafe { core::slice::from_raw_parts_mut(p, len) }
    }

    fn run_of<T: Element, const N: usize>(&self, at: [usize; N], len: usize) -> *mut T {
        assert_eq!(self.dtype(), T::DTYPE, "a slice must have the tensor's dtype");
        if len == 0 {
            return core::ptr::NonNull::dangling().as_ptr();
        }
        let last = N - 1;
        assert!(len == 1 || self.stride[last] == 1, "a slice needs unit stride");
        assert!(at[last] + len <= self.extent[last], "a slice must end inside the box");
        self.address(at).cast()
    }
}

/// Element types a slice can be taken of.
pub trait Element: Copy {
    /// The tensor dtype it stands for.
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
element!(f32 => F32, bf16 => Bf16, f16 => F16, i32 => I32, u32 => U32);

/// One task's call of a macro kernel.
#[derive(Debug)]
pub struct Call<'a> {
    /// The operands, in the order the kernel's file gives.
    pub tensors: &'a [Tensor],
    /// The task.
    pub task: &'a TaskDesc,
    /// The pass.
    pub step: &'a Step,
    /// The image's programs, for the kernel that chooses the next one.
    pub programs: &'a [perpetua_shared::image::ProgramDesc],
}

impl Call<'_> {
    /// Operand `i`; absent beyond the last.
    pub fn tensor(&self, i: usize) -> Tensor {
        self.tensors.get(i).copied().unwrap_or(Tensor::ABSENT)
    }

    /// How many of operand `i`'s rows (dimension 0) this pass computes.
    pub fn rows(&self, i: usize) -> usize {
        self.task.rows(self.tensor(i).extent(0) as u32, self.step.rows) as usize
    }
}
