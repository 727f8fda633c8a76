//! The PTX back end of [`arch`](super): sm_90a, PTX ISA 8.1.
//!
//! Laws, each from a miscompile that was seen:
//! - A barrier, shuffle or vote is an LLVM intrinsic, since those carry the `convergent` attribute; an `asm!` block
//!   does not, and LLVM would copy it into both arms of a branch. (MIR's JumpThreading copies even intrinsics: build.rs
//!   turns that pass off, and a test counts what is in the PTX.) Those of products by a warp lack it in LLVM 22, whose
//!   instructions have it: for them there is the count alone.
//! - Whatever touches memory or synchronises is a volatile `asm!` block with its memory clobber; `pure, nomem` stands
//!   only on arithmetic of one lane.
//! - No access is `.nc`.

use bytemuck::Pod;
use core::arch::{asm, global_asm};
use perpetua_shared::launch::{BEFORE_TILES_BYTES, LaunchParams, RESERVED_SHARED_BYTES};

// A block's shared memory, whose size the launch says. Its variables are numbers: from a name ptxas makes an address of
// the block's cluster, for which it reads a special register and waits wherever it is wanted. Without clusters, numbers
// are the same.
global_asm!(".extern .shared .align 128 .b8 perpetua_block[];");
const WORDS_AT: u32 = RESERVED_SHARED_BYTES;
const MBARRIERS_AT: u32 = WORDS_AT + 4 * super::shared::WORDS;
const TILES_AT: u32 = RESERVED_SHARED_BYTES + BEFORE_TILES_BYTES;
const _: () = assert!(
    WORDS_AT.is_multiple_of(128) && MBARRIERS_AT.is_multiple_of(8) && TILES_AT.is_multiple_of(super::warpgroup::ALIGN)
);
const _: () = assert!(MBARRIERS_AT + 8 * super::mbarrier::COUNT <= TILES_AT);

unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn nvvm_barrier(id: i32, threads: i32);
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.count"]
    fn nvvm_barrier_or(id: i32, threads: i32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn nvvm_warp_sync(members: i32);
    #[link_name = "llvm.nvvm.mma.m16n8k16.row.col.bf16"]
    fn nvvm_mma(a0: i32, a1: i32, a2: i32, a3: i32, b0: i32, b1: i32, c0: f32, c1: f32, c2: f32, c3: f32) -> Fragment;
    #[link_name = "llvm.nvvm.mma.m16n8k32.row.col.s8"]
    fn nvvm_mma_bytes(a0: i32, a1: i32, a2: i32, a3: i32, b0: i32, b1: i32, c0: i32, c1: i32, c2: i32, c3: i32)
    -> Sums;
    #[link_name = "llvm.nvvm.idp4a.s.s"]
    fn nvvm_dot_bytes(a: i32, b: i32, c: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn nvvm_shfl_bfly(members: i32, value: i32, mask: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn nvvm_shfl_idx(members: i32, value: i32, lane: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.or"]
    fn nvvm_redux_or(value: i32, members: i32) -> i32;
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    fn nvvm_wgmma_fence();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    fn nvvm_wgmma_commit();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    fn nvvm_wgmma_wait(left: i64);
    #[link_name = "llvm.fma.f32"]
    fn llvm_fma(a: f32, b: f32, c: f32) -> f32;
    #[link_name = "llvm.fma.f64"]
    fn llvm_fma64(a: f64, b: f64, c: f64) -> f64;
    #[link_name = "llvm.nvvm.ex2.approx.ftz.f"]
    fn nvvm_ex2(x: f32) -> f32;
    #[link_name = "llvm.nvvm.rsqrt.approx.ftz.f"]
    fn nvvm_rsqrt(x: f32) -> f32;
    #[link_name = "llvm.nvvm.rcp.approx.ftz.f"]
    fn nvvm_reciprocal(x: f32) -> f32;
    #[link_name = "llvm.nvvm.sqrt.rn.f"]
    fn nvvm_sqrt(x: f32) -> f32;
}

const ALL_LANES: i32 = -1;

/// What the intrinsic returns.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fragment(f32, f32, f32, f32);

/// Likewise of bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sums(i32, i32, i32, i32);

/// Threads that meet at the block's barrier.
const TASK_THREADS: i32 = perpetua_shared::launch::TASK_THREADS as i32;

pub(super) fn thread_idx() -> u32 {
    // SAFETY: reads a special register.
    unsafe { core::arch::nvptx::_thread_idx_x() as u32 }
}

pub(super) fn block_idx() -> u32 {
    // SAFETY: reads a special register.
    unsafe { core::arch::nvptx::_block_idx_x() as u32 }
}

pub(super) fn block_dim() -> u32 {
    // SAFETY: reads a special register.
    unsafe { core::arch::nvptx::_block_dim_x() as u32 }
}

pub(super) fn task_threads() -> u32 {
    TASK_THREADS as u32
}

pub(super) fn at_task(_: u32) {}

pub(super) unsafe fn barrier() {
    // SAFETY: the caller promises that the whole block is here.
    unsafe { nvvm_barrier(0, TASK_THREADS) }
}

pub(super) unsafe fn barrier_or(predicate: bool) -> bool {
    // SAFETY: the caller promises that the whole block is here.
    unsafe { nvvm_barrier_or(0, TASK_THREADS, predicate) }
}

pub(super) unsafe fn barrier_named(id: u32, threads: u32) {
    // SAFETY: the caller promises that so many threads come.
    unsafe { nvvm_barrier(id as i32, threads as i32) }
}

pub(super) unsafe fn warp_sync() {
    // SAFETY: the caller promises that the whole warp is here.
    unsafe { nvvm_warp_sync(ALL_LANES) }
}

pub(super) unsafe fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    // SAFETY: the caller promises that the whole warp is here.
    let d = unsafe {
        nvvm_mma(a[0] as i32, a[1] as i32, a[2] as i32, a[3] as i32, b[0] as i32, b[1] as i32, c[0], c[1], c[2], c[3])
    };
    [d.0, d.1, d.2, d.3]
}

pub(super) unsafe fn mma_bytes(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
    // SAFETY: the caller promises that the whole warp is here.
    let d = unsafe {
        nvvm_mma_bytes(
            a[0] as i32,
            a[1] as i32,
            a[2] as i32,
            a[3] as i32,
            b[0] as i32,
            b[1] as i32,
            c[0],
            c[1],
            c[2],
            c[3],
        )
    };
    [d.0, d.1, d.2, d.3]
}

pub(super) unsafe fn ldmatrix(at: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller promises the rows and the whole warp. Its intrinsic wants a pointer into shared memory, which
    // Rust does not have; a copy of this is harmless where no branch parts the warp (caller).
    unsafe {
        asm!(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) shared_address(at), options(nostack)
        );
    }
    [a, b, c, d]
}

fn mbarrier_address(number: u32) -> u32 {
    MBARRIERS_AT + 8 * number
}

pub(super) unsafe fn mbarrier_init(number: u32, count: u32) {
    let at = mbarrier_address(number);
    // SAFETY: the caller promises the number.
    unsafe { asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) at, in(reg32) count, options(nostack)) };
}

pub(super) fn mbarrier_fence() {
    // SAFETY: orders memory accesses and does nothing else.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) };
}

pub(super) unsafe fn mbarrier_arrive(number: u32) {
    let at = mbarrier_address(number);
    // SAFETY: the caller promises the barrier.
    unsafe { asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) at, options(nostack)) };
}

pub(super) unsafe fn mbarrier_arrive_expect(number: u32, bytes: u32) {
    let at = mbarrier_address(number);
    // SAFETY: the caller promises the barrier.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(reg32) at, in(reg32) bytes, options(nostack));
    }
}

/// An instruction that asks whether a phase has ended.
macro_rules! asks_for_phase {
    ($name:ident: $opcode:literal) => {
        pub(super) unsafe fn $name(number: u32, parity: u32) -> bool {
            let at = mbarrier_address(number);
            let over: u32;
            // SAFETY: the caller promises the barrier.
            unsafe {
                asm!(
                    "\t{{",
                    ".reg .pred over;",
                    concat!($opcode, ".parity.shared::cta.b64 over, [{}], {};"),
                    "selp.u32 {}, 1, 0, over;",
                    "\t}}",
                    in(reg32) at, in(reg32) parity, out(reg32) over, options(nostack)
                );
            }
            over != 0
        }
    };
}
asks_for_phase!(mbarrier_try_wait: "mbarrier.try_wait");
asks_for_phase!(mbarrier_test_wait: "mbarrier.test_wait");

pub(super) fn tile_address(at: u32) -> u32 {
    TILES_AT + at
}

pub(super) unsafe fn bulk_copy(to: u32, from: *const u8, bytes: u32, mbarrier: u32) {
    // SAFETY: the caller's promises. Without clusters the block's own address is one of the cluster's.
    unsafe {
        asm!(
            "\t{{",
            ".reg .b64 once;",
            "createpolicy.fractional.L2::evict_first.b64 once, 0f3F800000;",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [{}], [{}], {}, [{}], once;",
            "\t}}",
            in(reg32) tile_address(to), in(reg64) from, in(reg32) bytes, in(reg32) mbarrier_address(mbarrier),
            options(nostack)
        );
    }
}

pub(super) unsafe fn bulk_prefetch(from: *const u8, bytes: u32) {
    // SAFETY: the caller's promises.
    unsafe {
        asm!("cp.async.bulk.prefetch.L2.global [{}], {};", in(reg64) from, in(reg32) bytes, options(nostack));
    }
}

pub(super) fn fence_proxy_async() {
    // SAFETY: orders memory accesses and does nothing else.
    unsafe { asm!("fence.proxy.async.global;", options(nostack)) };
}

pub(super) fn fence_tiles() {
    // SAFETY: orders memory accesses and does nothing else.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) };
}

pub(super) unsafe fn copy_sixteen(to: u32, from: *const u8, is_there: bool) {
    // SAFETY: the caller's promises; of no bytes none is read.
    unsafe {
        asm!(
            "cp.async.cg.shared.global [{}], [{}], 16, {};",
            in(reg32) tile_address(to), in(reg64) from, in(reg32) if is_there { 16 } else { 0 }, options(nostack)
        );
    }
}

pub(super) unsafe fn copy_sixteen_if(is_mine: bool, to: u32, from: *const u8, is_there: bool) {
    // SAFETY: as above.
    unsafe {
        asm!(
            "{{ .reg .pred mine; setp.ne.u32 mine, {}, 0; @mine cp.async.cg.shared.global [{}], [{}], 16, {}; }}",
            in(reg32) u32::from(is_mine), in(reg32) tile_address(to), in(reg64) from,
            in(reg32) if is_there { 16 } else { 0 }, options(nostack)
        );
    }
}

pub(super) fn copy_commit() {
    // SAFETY: touches no memory.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) };
}

pub(super) fn copy_wait<const LEFT: u32>() {
    // SAFETY: waits.
    unsafe { asm!("cp.async.wait_group {};", const LEFT, options(nostack)) };
}

/// An instruction on a thread's sums, operands 0 to 7, 15, 31 or 63, which stand between `$before` and `$after`.
macro_rules! with_sums {
    (8 $sums:ident, $before:literal, $after:literal $(, $operand:ident = $class:ident $value:expr)*) => {
        with_sums!(@ $sums, $before, $after, [$($operand = $class $value),*]; 1 2 3 4 5 6 7)
    };
    (16 $sums:ident, $before:literal, $after:literal $(, $operand:ident = $class:ident $value:expr)*) => {
        with_sums!(@ $sums, $before, $after, [$($operand = $class $value),*]; 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (32 $sums:ident, $before:literal, $after:literal $(, $operand:ident = $class:ident $value:expr)*) => {
        with_sums!(@ $sums, $before, $after, [$($operand = $class $value),*]; 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22
            23 24 25 26 27 28 29 30 31)
    };
    (64 $sums:ident, $before:literal, $after:literal $(, $operand:ident = $class:ident $value:expr)*) => {
        with_sums!(@ $sums, $before, $after, [$($operand = $class $value),*]; 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22
            23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59
            60 61 62 63)
    };
    (@ $sums:ident, $before:literal, $after:literal, [$($operand:ident = $class:ident $value:expr),*]; $($at:literal)*) => {
        asm!(
            concat!($before, "{{{0}" $(, ", {", $at, "}")*, "}}", $after),
            inout(reg32) $sums[0], $(inout(reg32) $sums[$at],)* $($operand = in($class) $value,)*
            options(nostack)
        )
    };
}

/// The sums as an array of the length that they have.
///
/// # Safety
/// `N == M`.
unsafe fn of_length<const N: usize, const M: usize>(sums: &mut [f32; N]) -> &mut [f32; M] {
    // SAFETY: the same type (caller).
    unsafe { &mut *core::ptr::from_mut(sums).cast() }
}

pub(super) unsafe fn wgmma<const N: usize>(sums: &mut [f32; N], a: u64, b: u64) {
    // SAFETY: the caller promises the matrices and the whole warpgroup. There is no intrinsic for it; a copy of this is
    // harmless where no branch parts the warp (caller).
    unsafe {
        if N == 8 {
            let sums: &mut [f32; 8] = of_length(sums);
            with_sums!(
                8 sums, "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 ", ", {a}, {b}, 1, 1, 1, 0, 0;", a = reg64 a, b = reg64 b
            );
        } else if N == 16 {
            let sums: &mut [f32; 16] = of_length(sums);
            with_sums!(
                16 sums, "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 ", ", {a}, {b}, 1, 1, 1, 0, 0;", a = reg64 a, b = reg64 b
            );
        } else if N == 32 {
            let sums: &mut [f32; 32] = of_length(sums);
            with_sums!(
                32 sums, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 ", ", {a}, {b}, 1, 1, 1, 0, 0;", a = reg64 a, b = reg64 b
            );
        } else {
            let sums: &mut [f32; 64] = of_length(sums);
            with_sums!(
                64 sums, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 ", ", {a}, {b}, 1, 1, 1, 0, 0;", a = reg64 a, b = reg64 b
            );
        }
    }
}

pub(super) unsafe fn wgmma_transposed<const N: usize>(sums: &mut [f32; N], a: [u32; 4], b: u64) {
    // SAFETY: as above.
    unsafe {
        if N == 32 {
            let sums: &mut [f32; 32] = of_length(sums);
            with_sums!(
                32 sums, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 ", ", {{{a}, {b}, {c}, {d}}}, {of}, 1, 1, 1, 1;",
                a = reg32 a[0], b = reg32 a[1], c = reg32 a[2], d = reg32 a[3], of = reg64 b
            );
        } else {
            let sums: &mut [f32; 64] = of_length(sums);
            with_sums!(
                64 sums, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 ", ", {{{a}, {b}, {c}, {d}}}, {of}, 1, 1, 1, 1;",
                a = reg32 a[0], b = reg32 a[1], c = reg32 a[2], d = reg32 a[3], of = reg64 b
            );
        }
    }
}

pub(super) fn wgmma_taken<const N: usize>(mut sums: [f32; N]) -> [f32; N] {
    // Nothing moves from behind this, which depends on all of them, to before it, and this stays behind the wait.
    // SAFETY: does nothing.
    unsafe {
        if N == 8 {
            let sums: &mut [f32; 8] = of_length(&mut sums);
            with_sums!(8 sums, "/* ", " */");
        } else if N == 16 {
            let sums: &mut [f32; 16] = of_length(&mut sums);
            with_sums!(16 sums, "/* ", " */");
        } else if N == 32 {
            let sums: &mut [f32; 32] = of_length(&mut sums);
            with_sums!(32 sums, "/* ", " */");
        } else {
            let sums: &mut [f32; 64] = of_length(&mut sums);
            with_sums!(64 sums, "/* ", " */");
        }
    }
    sums
}

pub(super) unsafe fn wgmma_fence() {
    // SAFETY: the caller promises that the whole warpgroup is here.
    unsafe { nvvm_wgmma_fence() }
}

pub(super) unsafe fn wgmma_commit() {
    // SAFETY: the caller promises that the whole warpgroup is here.
    unsafe { nvvm_wgmma_commit() }
}

pub(super) fn wgmma_before_waiting() {
    // SAFETY: it has no operands, and orders more than there is to order.
    unsafe { asm!("fence.acq_rel.cta;", options(nostack)) };
}

pub(super) unsafe fn wgmma_wait<const LEFT: u32>() {
    // SAFETY: the caller promises that the whole warpgroup is here.
    unsafe { nvvm_wgmma_wait(const { LEFT as i64 }) }
}

pub(super) unsafe fn tile_load16(at: u32) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { load16_at(tile_address(at)) }
}

pub(super) unsafe fn tile_load8(at: u32) -> [u32; 2] {
    // SAFETY: the caller's promise.
    unsafe { load8_at(tile_address(at)) }
}

pub(super) unsafe fn tile_load4(at: u32) -> u32 {
    let value;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.shared.u32 {}, [{}];", out(reg32) value, in(reg32) tile_address(at), options(nostack)) };
    value
}

pub(super) unsafe fn tile_load2(at: u32) -> u16 {
    let value;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.shared.u16 {}, [{}];", out(reg16) value, in(reg32) tile_address(at), options(nostack)) };
    value
}

pub(super) unsafe fn shared_load16(at: u32) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { load16_at(shared_address(at)) }
}

pub(super) unsafe fn shared_load8(at: u32) -> [u32; 2] {
    // SAFETY: the caller's promise.
    unsafe { load8_at(shared_address(at)) }
}

unsafe fn load8_at(at: u32) -> [u32; 2] {
    let (a, b);
    // SAFETY: the caller promises eight aligned bytes of shared memory.
    unsafe {
        asm!("ld.shared.v2.u32 {{{}, {}}}, [{}];", out(reg32) a, out(reg32) b, in(reg32) at, options(nostack));
    }
    [a, b]
}

unsafe fn load16_at(at: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller promises sixteen aligned bytes of shared memory.
    unsafe {
        asm!(
            "ld.shared.v4.u32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) at, options(nostack)
        );
    }
    [a, b, c, d]
}

pub(super) unsafe fn shared_store16(at: u32, value: [u32; 4]) {
    // SAFETY: the caller's promise.
    unsafe { store16_at(shared_address(at), value) }
}

pub(super) unsafe fn shared_store8(at: u32, [a, b]: [u32; 2]) {
    // SAFETY: the caller promises eight aligned bytes of shared memory.
    unsafe {
        asm!(
            "st.shared.v2.u32 [{}], {{{}, {}}};",
            in(reg32) shared_address(at), in(reg32) a, in(reg32) b, options(nostack)
        );
    }
}

pub(super) unsafe fn tile_store16(at: u32, value: [u32; 4]) {
    // SAFETY: the caller's promise.
    unsafe { store16_at(tile_address(at), value) }
}

unsafe fn store16_at(at: u32, value: [u32; 4]) {
    let [a, b, c, d] = value;
    // SAFETY: the caller promises sixteen aligned bytes of shared memory.
    unsafe {
        asm!(
            "st.shared.v4.u32 [{}], {{{}, {}, {}, {}}};",
            in(reg32) at, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack)
        );
    }
}

pub(super) unsafe fn shuffle_xor(value: u32, mask: u32) -> u32 {
    // SAFETY: the caller promises that the whole warp is here.
    unsafe { nvvm_shfl_bfly(ALL_LANES, value as i32, mask as i32, 31) as u32 }
}

pub(super) unsafe fn shuffle(value: u32, lane: u32) -> u32 {
    // SAFETY: the caller promises that the whole warp is here.
    unsafe { nvvm_shfl_idx(ALL_LANES, value as i32, lane as i32, 31) as u32 }
}

pub(super) unsafe fn union(value: u32) -> u32 {
    // SAFETY: the caller promises that the whole warp is here.
    unsafe { nvvm_redux_or(value as i32, ALL_LANES) as u32 }
}

pub(super) fn timer_ns() -> u64 {
    let ns;
    // SAFETY: reads a special register; volatile, since it changes.
    unsafe { asm!("mov.u64 {}, %globaltimer;", out(reg64) ns, options(nostack)) };
    ns
}

pub(super) fn sleep_ns(ns: u32) {
    // SAFETY: touches no memory.
    unsafe { asm!("nanosleep.u32 {};", in(reg32) ns, options(nostack)) };
}

pub(super) unsafe fn shared_load(at: u32) -> u32 {
    let value;
    // SAFETY: the caller promises a word of shared memory.
    unsafe { asm!("ld.shared.u32 {}, [{}];", out(reg32) value, in(reg32) shared_address(at), options(nostack)) };
    value
}

pub(super) unsafe fn shared_constant<const N: usize>(at: u32) -> [u32; N] {
    let mut values = [0; N];
    for i in 0..N {
        // SAFETY: the caller promises words of shared memory which nobody writes meanwhile. Reading them has no effect.
        unsafe {
            asm!(
                "ld.shared.u32 {}, [{}];",
                out(reg32) values[i], in(reg32) shared_address(at + i as u32), options(pure, readonly, nostack)
            );
        }
    }
    values
}

pub(super) unsafe fn shared_store(at: u32, value: u32) {
    // SAFETY: the caller promises a word of shared memory.
    unsafe { asm!("st.shared.u32 [{}], {};", in(reg32) shared_address(at), in(reg32) value, options(nostack)) };
}

pub(super) unsafe fn shared_or(at: u32, bits: u32) -> u32 {
    let was;
    // SAFETY: the caller promises a word of shared memory.
    unsafe {
        asm!(
            "atom.relaxed.cta.shared.or.b32 {}, [{}], {};",
            out(reg32) was, in(reg32) shared_address(at), in(reg32) bits, options(nostack)
        );
    }
    was
}

fn shared_address(at: u32) -> u32 {
    WORDS_AT + 4 * at
}

pub(super) fn shared_is_in_place() -> bool {
    let base: u32;
    // SAFETY: takes an address.
    unsafe { asm!("mov.u32 {}, perpetua_block;", out(reg32) base, options(pure, nomem, nostack)) };
    base == RESERVED_SHARED_BYTES
}

/// Four words of global memory from `$from` on, by the instruction `$opcode`.
macro_rules! load_four {
    ($opcode:literal, $from:expr) => {{
        let (a, b, c, d);
        asm!(
            concat!($opcode, " {{{}, {}, {}, {}}}, [{}];"),
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) $from, options(nostack)
        );
        [a, b, c, d]
    }};
}

pub(super) unsafe fn load_relaxed(word: *const u32) -> u32 {
    let value;
    // SAFETY: the caller promises a word of global memory.
    unsafe { asm!("ld.relaxed.gpu.global.u32 {}, [{}];", out(reg32) value, in(reg64) word, options(nostack)) };
    value
}

pub(super) unsafe fn load16_relaxed(words: *const u32) -> [u32; 4] {
    // SAFETY: the caller promises 16 aligned bytes of global memory. Each of the four is an access of its own, as
    // strong as one alone.
    unsafe { load_four!("ld.relaxed.gpu.global.v4.u32", words) }
}

pub(super) fn settled() {}

pub(super) unsafe fn store_relaxed(word: *mut u32, value: u32) {
    // SAFETY: the caller promises a word of global memory.
    unsafe { asm!("st.relaxed.gpu.global.u32 [{}], {};", in(reg64) word, in(reg32) value, options(nostack)) };
}

pub(super) unsafe fn store16_relaxed(words: *mut u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller promises 16 aligned bytes of global memory. Each of the four is an access of its own, as
    // strong as one alone.
    unsafe {
        asm!(
            "st.relaxed.gpu.global.v4.u32 [{}], {{{}, {}, {}, {}}};",
            in(reg64) words, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack)
        );
    }
}

pub(super) unsafe fn load_acquire(word: *const u32) -> u32 {
    let value;
    // SAFETY: the caller promises a word of global memory.
    unsafe { asm!("ld.acquire.gpu.global.u32 {}, [{}];", out(reg32) value, in(reg64) word, options(nostack)) };
    value
}

pub(super) unsafe fn add_release(word: *mut u32, value: u32) {
    // SAFETY: the caller promises a word of global memory.
    unsafe { asm!("red.release.gpu.global.add.u32 [{}], {};", in(reg64) word, in(reg32) value, options(nostack)) };
}

pub(super) unsafe fn store_release(word: *mut u32, value: u32) {
    // SAFETY: the caller promises a word of global memory.
    unsafe { asm!("st.release.gpu.global.u32 [{}], {};", in(reg64) word, in(reg32) value, options(nostack)) };
}

pub(super) unsafe fn add_relaxed(word: *mut u32, value: u32) {
    // SAFETY: the caller promises a word of global memory.
    unsafe { asm!("red.relaxed.gpu.global.add.u32 [{}], {};", in(reg64) word, in(reg32) value, options(nostack)) };
}

pub(super) unsafe fn fetch_add(word: *mut u32, value: u32) -> u32 {
    let was;
    // SAFETY: the caller promises a word of global memory.
    unsafe {
        asm!(
            "atom.relaxed.gpu.global.add.u32 {}, [{}], {};",
            out(reg32) was, in(reg64) word, in(reg32) value, options(nostack)
        );
    }
    was
}

pub(super) unsafe fn add_four(to: *mut f32, four: [f32; 4]) {
    let [a, b, c, d] = four;
    // SAFETY: the caller promises four aligned numbers of global memory.
    unsafe {
        asm!(
            "red.relaxed.gpu.global.add.v4.f32 [{}], {{{}, {}, {}, {}}};",
            in(reg64) to, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack)
        );
    }
}

pub(super) unsafe fn compare_exchange(word: *mut u32, old: u32, new: u32) -> u32 {
    let was;
    // SAFETY: the caller promises a word of global memory.
    unsafe {
        asm!(
            "atom.acq_rel.gpu.global.cas.b32 {}, [{}], {}, {};",
            out(reg32) was, in(reg64) word, in(reg32) old, in(reg32) new, options(nostack)
        );
    }
    was
}

pub(super) fn opaque(mut pointer: *mut u8) -> *mut u8 {
    // SAFETY: does nothing.
    unsafe { asm!("/* {} */", inout(reg64) pointer, options(nostack, preserves_flags)) };
    pointer
}

pub(super) fn opaque_word(mut word: u32) -> u32 {
    // SAFETY: does nothing.
    unsafe { asm!("/* {} */", inout(reg32) word, options(nostack, preserves_flags)) };
    word
}

pub(super) fn forget() {
    // SAFETY: does nothing, of which the compiler knows no more than that memory may be another.
    unsafe { asm!("", options(nostack, preserves_flags)) };
}

pub(super) fn rolled() {
    // SAFETY: a hint.
    unsafe { asm!(".pragma \"nounroll\";", options(nostack, preserves_flags)) };
}

pub(super) unsafe fn load<T: Copy>(from: *const T) -> T {
    // SAFETY: the caller's promise.
    unsafe { from.read() }
}

pub(super) unsafe fn load_volatile<T: Copy>(from: *const T) -> T {
    // SAFETY: the caller's promise.
    unsafe { from.read_volatile() }
}

/// The launch block, in the constant memory where an entry's parameters lie.
///
/// PERF: each field is read where it is wanted, by an instruction that names the parameter, which the assembler makes
/// an operand of whoever uses it. Read as the fields of a struct they would be loaded where the entry begins, and kept:
/// 238 registers in place of 222 (ptxas 13.0; 236 when the block lay in global memory).
#[derive(Clone, Copy, Debug)]
pub struct LaunchBlock(());

impl LaunchBlock {
    /// That of the entry which is running.
    ///
    /// # Safety
    /// The entry's first parameter is a [`LaunchParams`], by value.
    pub(crate) unsafe fn of_entry() -> LaunchBlock {
        LaunchBlock(())
    }

    /// What `field` takes out of it, which lies `AT` bytes from its start.
    pub(crate) fn get<const AT: usize, T: Pod>(self, _field: impl FnOnce(&LaunchParams) -> T) -> T {
        const { assert!(AT + size_of::<T>() <= size_of::<LaunchParams>()) };
        // build.rs puts each entry's own parameter for `perpetua_launch_block`. Not `pure`: each call is a load where
        // it stands.
        // SAFETY: see `of_entry`; any bytes are a value of the type.
        unsafe {
            if size_of::<T>() == 4 {
                let word: u32;
                asm!("ld.param.u32 {}, [perpetua_launch_block+{}];", out(reg32) word, const AT, options(nostack, nomem));
                bytemuck::cast(word)
            } else {
                let word: u64;
                asm!("ld.param.u64 {}, [perpetua_launch_block+{}];", out(reg64) word, const AT, options(nostack, nomem));
                bytemuck::cast(word)
            }
        }
    }
}

pub(super) unsafe fn store<T: Copy>(to: *mut T, value: T) {
    // SAFETY: the caller's promise.
    unsafe { to.write(value) }
}

pub(super) unsafe fn store_volatile<T: Copy>(to: *mut T, value: T) {
    // SAFETY: the caller's promise.
    unsafe { to.write_volatile(value) }
}

pub(super) unsafe fn constant<'a, T>(start: *const T, len: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts(start, len) }
}

pub(super) unsafe fn exclusive<'a, T>(at: *mut T) -> &'a mut T {
    // SAFETY: the caller's promise.
    unsafe { &mut *at }
}

pub(super) unsafe fn load16(from: *const u8) -> [u32; 4] {
    // SAFETY: the caller promises 16 aligned bytes of global memory.
    unsafe { load_four!("ld.global.v4.u32", from) }
}

pub(super) unsafe fn store16(to: *mut u8, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller promises 16 aligned bytes of global memory.
    unsafe {
        asm!(
            "st.global.v4.u32 [{}], {{{}, {}, {}, {}}};",
            in(reg64) to, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack)
        );
    }
}

pub(super) unsafe fn load16_stream(from: *const u8) -> [u32; 4] {
    // SAFETY: the caller promises 16 aligned bytes of global memory.
    unsafe { load_four!("ld.global.L1::no_allocate.v4.u32", from) }
}

pub(super) fn fma(a: f32, b: f32, c: f32) -> f32 {
    // SAFETY: arithmetic.
    unsafe { llvm_fma(a, b, c) }
}

pub(super) fn fma64(a: f64, b: f64, c: f64) -> f64 {
    // SAFETY: arithmetic.
    unsafe { llvm_fma64(a, b, c) }
}

pub(super) fn exp2(x: f32) -> f32 {
    // SAFETY: arithmetic.
    unsafe { nvvm_ex2(x) }
}

pub(super) fn rsqrt(x: f32) -> f32 {
    // SAFETY: arithmetic.
    unsafe { nvvm_rsqrt(x) }
}

pub(super) fn reciprocal(x: f32) -> f32 {
    // SAFETY: arithmetic.
    unsafe { nvvm_reciprocal(x) }
}

pub(super) fn sqrt(x: f32) -> f32 {
    // SAFETY: arithmetic.
    unsafe { nvvm_sqrt(x) }
}

pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let x;
    // SAFETY: arithmetic.
    unsafe { asm!("cvt.f32.f16 {}, {};", out(reg32) x, in(reg16) bits, options(pure, nomem, nostack)) };
    x
}

pub(super) fn f32_to_f16(x: f32) -> u16 {
    let bits;
    // SAFETY: arithmetic.
    unsafe { asm!("cvt.rn.f16.f32 {}, {};", out(reg16) bits, in(reg32) x, options(pure, nomem, nostack)) };
    bits
}

pub(super) fn f32_to_bf16(x: f32) -> u16 {
    let bits;
    // SAFETY: arithmetic.
    unsafe { asm!("cvt.rn.bf16.f32 {}, {};", out(reg16) bits, in(reg32) x, options(pure, nomem, nostack)) };
    bits
}

pub(super) fn f32_to_bf16_pair(low: f32, high: f32) -> u32 {
    let bits;
    // SAFETY: arithmetic.
    unsafe {
        asm!(
            "cvt.rn.bf16x2.f32 {}, {}, {};",
            out(reg32) bits, in(reg32) high, in(reg32) low, options(pure, nomem, nostack)
        );
    }
    bits
}

pub(super) fn dot_bytes(a: u32, b: u32, c: i32) -> i32 {
    // SAFETY: arithmetic.
    unsafe { nvvm_dot_bytes(a as i32, b as i32, c) }
}

pub(super) fn low_bytes_in_turn(first: u32, second: u32) -> u32 {
    let bytes;
    // SAFETY: arithmetic.
    unsafe {
        asm!("prmt.b32 {}, {}, {}, 0x5140;", out(reg32) bytes, in(reg32) first, in(reg32) second, options(pure, nomem, nostack));
    }
    bytes
}

pub(super) fn permute(low: u32, high: u32, numbers: u32) -> u32 {
    let bytes;
    // SAFETY: arithmetic.
    unsafe {
        asm!(
            "prmt.b32 {}, {}, {}, {};", out(reg32) bytes, in(reg32) low, in(reg32) high, in(reg32) numbers,
            options(pure, nomem, nostack)
        );
    }
    bytes
}

pub(super) fn with_byte<const AT: u32>(word: u32, from: u32) -> u32 {
    let bytes;
    // SAFETY: arithmetic.
    unsafe {
        asm!(
            "prmt.b32 {}, {}, {}, {};", out(reg32) bytes, in(reg32) from, in(reg32) word, const 0x7604 + 16 * AT,
            options(pure, nomem, nostack)
        );
    }
    bytes
}

pub(super) fn low_halves(first: u32, second: u32) -> u32 {
    let halves;
    // SAFETY: arithmetic.
    unsafe {
        asm!("prmt.b32 {}, {}, {}, 0x5410;", out(reg32) halves, in(reg32) first, in(reg32) second, options(pure, nomem, nostack));
    }
    halves
}

pub(super) fn high_halves(first: u32, second: u32) -> u32 {
    let halves;
    // SAFETY: arithmetic.
    unsafe {
        asm!("prmt.b32 {}, {}, {}, 0x7632;", out(reg32) halves, in(reg32) first, in(reg32) second, options(pure, nomem, nostack));
    }
    halves
}

pub(super) fn trap() -> ! {
    // SAFETY: does not return.
    unsafe { core::arch::nvptx::trap() }
}
