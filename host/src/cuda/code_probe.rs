//! A probe of straight code, made here as PTX: what instructions cost by how many of them come again, since rustc has
//! no way to write a given number of them.

use perpetua_shared::launch::TASK_THREADS;
use perpetua_shared::probe::ProbeParams;
use std::fmt::Write as _;
use std::mem::offset_of;

/// The kernel's name.
pub(super) const ENTRY: &str = "perpetua_probe_code";
/// Threads of a block: as many as run tasks.
pub(super) const THREADS: u32 = TASK_THREADS;

/// Instructions of a segment, 16 bytes each, and segments.
const SEGMENT: u32 = 512;
const SEGMENTS: u32 = 32;

/// KiB of code that the probe runs in steps of, and at most.
pub(super) const STEP_KIB: u32 = SEGMENT * 16 / 1024;
pub(super) const MOST_KIB: u32 = SEGMENTS * STEP_KIB;

/// The module. A block runs the first `n_tiles` segments `rounds` times and says in `out[block]` how many ns that took:
/// multiplications and additions in eight chains, of which none waits for its neighbour, on all warps.
pub(super) fn ptx() -> String {
    let mut text = format!(
        ".version 8.1\n.target sm_90a\n.address_size 64\n.visible .entry {ENTRY}(\n.param .align 8 .b8 {ENTRY}_param_0[{}]\n)\n{{\n\
         .reg .pred %p<3>;\n.reg .b32 %r<24>;\n.reg .b64 %rd<8>;\n\
         ld.param.b64 %rd1, [{ENTRY}_param_0+{}];\nld.param.b32 %r1, [{ENTRY}_param_0+{}];\nld.param.b32 %r2, [{ENTRY}_param_0+{}];\n\
         mov.u32 %r3, %tid.x;\nmov.u32 %r4, %ctaid.x;\ncvt.rn.f32.u32 %r18, %r3;\n",
        size_of::<ProbeParams>(),
        offset_of!(ProbeParams, out),
        offset_of!(ProbeParams, n_tiles),
        offset_of!(ProbeParams, rounds),
    );
    for chain in 0..8 {
        let _ = writeln!(text, "add.rn.f32 %r{}, %r18, 0f3F800000;", 8 + chain);
    }
    let _ = writeln!(text, "mov.b32 %r5, 0;\nbar.sync 0, {THREADS};\nmov.u64 %rd2, %globaltimer;\n$again:");
    for segment in 0..SEGMENTS {
        let _ = writeln!(text, "setp.le.u32 %p1, %r1, {segment};\n@%p1 bra $round;");
        for at in 0..SEGMENT {
            let chain = 8 + at % 8;
            let _ = writeln!(text, "fma.rn.f32 %r{chain}, %r{chain}, %r18, %r18;");
        }
    }
    text.push_str("$round:\nadd.s32 %r5, %r5, 1;\nsetp.lt.u32 %p1, %r5, %r2;\n@%p1 bra $again;\n");
    for chain in 1..8 {
        let _ = writeln!(text, "add.rn.f32 %r8, %r8, %r{};", 8 + chain);
    }
    // What is computed has to be looked at: the time is one more if it is a number that it is not.
    let _ = writeln!(
        text,
        "bar.sync 0, {THREADS};\nmov.u64 %rd3, %globaltimer;\nsub.s64 %rd4, %rd3, %rd2;\nsetp.eq.b32 %p2, %r8, 12345;\n\
         selp.b64 %rd5, 1, 0, %p2;\nadd.s64 %rd4, %rd4, %rd5;\nsetp.ne.b32 %p1, %r3, 0;\n@%p1 bra $end;\n\
         mul.wide.u32 %rd6, %r4, 8;\nadd.s64 %rd7, %rd1, %rd6;\nst.global.b64 [%rd7], %rd4;\n$end:\nret;\n}}"
    );
    text
}
