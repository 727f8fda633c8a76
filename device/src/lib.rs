//! perpetua's device side: the worker loop and the macro kernels.
//!
//! One source, two lives. Compiled for `nvptx64-nvidia-cuda` it is the persistent kernel; compiled for the host it is
//! the CPU executors' engine, and its logic is tested there without a GPU. It knows images and nothing above them.
//!
//! - [`sync`]: the few atomics the protocol uses, as a trait; no fence or atomic stands anywhere else.
//! - [`worker`]: the loop every resident worker runs, generic over [`sync::Sync`].
//! - [`advance`]: the token loop's turn, from one [`Step`](perpetua_shared::Step) to the next.
//! - [`kernels`]: one file per macro kernel, and the one list.
//! - `turns`: tasks as the persistent kernel fetches them.
//! - [`probe`]: small kernels that measure a GPU.
//! - [`entry`], [`gpu`], [`block`], `arch`: the kernel's entry, what GPU bodies are written in, and the instructions
//!   under it. On the host they run on `simt`, a simulated GPU that checks every access.
//!
//! What a GPU body is made of is inlined, all of it, since a call would cost the kernel a stack; and LLVM is told that
//! functions are convergent, or it would copy calls of those that have barriers in them. `build.rs` sees to both, so no
//! function here says anything of it (`inline(always)` is for vector code, which has its instruction set from its
//! caller).
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    // Each module of PTX is made of a part of the crate; what nobody uses the host's build tells.
    allow(internal_features, dead_code),
    feature(abi_ptx, asm_experimental_arch, stdarch_nvptx, link_llvm_intrinsics, abi_unadjusted)
)]

pub mod advance;
pub mod kernels;
pub mod queue;
pub mod scheduler;
pub mod sync;
pub mod worker;

#[cfg(not(target_arch = "nvptx64"))]
pub mod cpu;
#[cfg(not(target_arch = "nvptx64"))]
pub mod io;
pub mod lookup;
#[cfg(not(target_arch = "nvptx64"))]
pub mod turns;

mod arch;
pub mod block;
pub mod entry;
pub mod gpu;
pub mod probe;

#[cfg(not(target_arch = "nvptx64"))]
pub use arch::simt;
