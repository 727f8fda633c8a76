//! Small kernels in PTX as LLVM writes it.

use super::{Assembled, InstructionCache, Launch, MachineInstruction, Marks, Memory, Module, PtxError, Report};

const OUT: u64 = 0x10_0000;

/// Runs the one entry of `body`, whose only parameter is the address of `words`, on a block of `threads`.
fn run(declarations: &str, body: &str, threads: u32, seed: u64, words: &mut [u32]) -> Result<Report, PtxError> {
    run_with((InstructionCache::ENDLESS, None), declarations, body, threads, seed, words)
}

/// Likewise, on an SM that holds so much of the code, and of this machine code.
fn run_with(
    (cache, assembled): (InstructionCache, Option<&Assembled>),
    declarations: &str,
    body: &str,
    threads: u32,
    seed: u64,
    words: &mut [u32],
) -> Result<Report, PtxError> {
    let text = format!(
        ".version 8.6\n.target sm_90a\n.address_size 64\n.shared .align 16 .b8 words[4096];\n.shared .align 8 .b8 phases[64];\n\
         .visible .entry kernel(\n.param .u64 kernel_param_0\n)\n{{\n.reg .pred %p<8>;\n.reg .b16 %rs<8>;\n.reg .b32 %r<200>;\n\
         .reg .b64 %rd<32>;\n{declarations}\nld.param.b64 %rd1, [kernel_param_0];\nmov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\n{body}\nret;\n}}\n"
    );
    let module = Module::parse(&text)?;
    let mut memory = Memory::default();
    // SAFETY: the words are borrowed until the launch is over.
    unsafe { memory.add("words", OUT, words.as_mut_ptr().cast(), 4 * words.len() as u64, false) };
    let launch = Launch {
        entry: "kernel",
        threads,
        params: &[&OUT.to_le_bytes()],
        seed,
        began_ns: 7,
        marks: Some(Marks { first: OUT, n: 1, cache, assembled }),
        most_instructions: 100_000,
        ..Launch::default()
    };
    module.launch(&launch, &memory)
}

fn what(error: PtxError) -> String {
    error.to_string()
}

#[test]
fn lanes_part_and_meet_again() {
    // Odd lanes count down from their number, even ones do not; all add up their neighbours'.
    let body = "mov.b32 %r2, %r1;\nand.b32 %r3, %r1, 1;\nsetp.eq.b32 %p1, %r3, 0;\n@%p1 bra $done;\n\
        $loop:\nadd.s32 %r2, %r2, -1;\nsetp.gt.u32 %p2, %r2, 3;\n@%p2 bra $loop;\n\
        $done:\nshfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;\nst.global.b32 [%rd3], %r4;";
    let left = |lane: u32| if lane.is_multiple_of(2) { lane } else { lane.saturating_sub(1).min(3) };
    let expected: Vec<u32> = (0..32).map(|lane| left(lane ^ 1)).collect();
    // Those that sleep before they meet the others, too.
    let sleepy = body.replace("$done:", "nanosleep.u32 64;\n$done:");
    for (body, seed) in [body, &sleepy].into_iter().flat_map(|body| (0..20).map(move |seed| (body, seed))) {
        let mut words = [0; 32];
        run("", body, 32, seed, &mut words).expect("all lanes come to the shuffle");
        assert_eq!(words[..], expected, "seed {seed}");
    }
}

#[test]
fn lanes_put_their_bits_together() {
    // Odd lanes come later, and all have a bit of their own but lane 4.
    let body = "shl.b32 %r2, 1, %r1;\nand.b32 %r3, %r1, 1;\nsetp.eq.b32 %p1, %r3, 0;\n@%p1 bra $met;\nnanosleep.u32 64;\n\
        $met:\nsetp.eq.b32 %p2, %r1, 4;\n@%p2 mov.b32 %r2, 0;\nredux.sync.or.b32 %r4, %r2, -1;\nst.global.b32 [%rd3], %r4;";
    for seed in 0..20 {
        let mut words = [0; 32];
        run("", body, 32, seed, &mut words).expect("all lanes come to it");
        assert_eq!(words, [!(1 << 4); 32], "seed {seed}");
    }
}

#[test]
fn a_barrier_that_was_copied_is_seen() {
    let body =
        "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $other;\nbar.sync 0, 64;\nbra.uni $done;\n$other:\nbar.sync 0, 64;\n$done:";
    let error = run("", body, 64, 1, &mut [0; 64]).expect_err("one warp is at both");
    assert!(what(error.clone()).contains("for aligned lanes, behind a branch that parts them until line"), "{error}");
    // Of whole warps it is one barrier.
    let body = body.replace("%r1, 5", "%r1, 32");
    run("", &body, 64, 1, &mut [0; 64]).expect("two warps at two places");
}

/// Though in the end all of them come to it.
#[test]
fn aligned_lanes_meet_behind_no_branch_that_has_parted_them() {
    // Whoever has bit 5 of its number, none of 32, would go past the barrier: so it does not stand where lanes meet
    // again.
    let guarded = "and.b32 %r3, %r1, 1;\nsetp.eq.b32 %p1, %r3, 0;\n@%p1 bra $met;\nand.b32 %r4, %r1, 32;\nsetp.ne.b32 %p2, %r4, 0;\n\
        @%p2 bra $done;\n$met:\nbar.sync 0, 32;\nst.global.b32 [%rd3], %r1;\n$done:";
    // A lane asks as often as its number says, and all meet each time.
    let polling = "mov.b32 %r2, 0;\n$again:\nadd.s32 %r2, %r2, 1;\nbar.sync 0, 32;\nsetp.le.u32 %p1, %r2, %r1;\n\
        @%p1 bra $again;\nst.global.b32 [%rd3], %r2;";
    for (body, seed) in [guarded, polling].into_iter().flat_map(|body| (0..20).map(move |seed| (body, seed))) {
        let error = run("", body, 32, seed, &mut [0; 32]).expect_err("lanes are parted there");
        assert!(what(error.clone()).contains("for aligned lanes, behind a branch"), "{error}, seed {seed}");
    }
    // All ask as often as the last does, since each asks whether any must.
    let together = polling.replace(
        "setp.le.u32 %p1, %r2, %r1;",
        "setp.le.u32 %p2, %r2, %r1;\nselp.b32 %r6, 1, 0, %p2;\n\
        redux.sync.or.b32 %r7, %r6, -1;\nsetp.ne.b32 %p1, %r7, 0;",
    );
    for seed in 0..20 {
        let mut words = [0; 32];
        run("", &together, 32, seed, &mut words).expect("no branch parts them");
        assert_eq!(words, [32; 32], "seed {seed}");
    }
}

#[test]
fn who_waits_for_nobody_is_named() {
    let error = run("", "bar.sync 0, 64;", 32, 0, &mut [0; 32]).expect_err("one of two warps");
    assert_eq!(what(error), "nobody can go on: 32 threads at line 19 (AtBarrier(0))");
    let poll = "$again:\nld.relaxed.gpu.global.u32 %r2, [%rd1];\nsetp.eq.b32 %p1, %r2, 0;\n@%p1 bra $again;";
    let error = run("", poll, 32, 0, &mut [0; 32]).expect_err("nobody writes the word");
    assert!(what(error.clone()).contains("instructions, and no end"), "{error}");
}

#[test]
fn addresses_are_checked() {
    let refused = |body: &str| what(run("", body, 32, 0, &mut [0; 32]).expect_err("refused"));
    let error = refused("ld.b32 %r2, [%rd3+4];");
    assert!(
        error.ends_with("4 bytes at 0x100080 are in no allocation, 128 bytes into words, which has 128"),
        "{error}"
    );
    let error = refused("ld.b32 %r2, [%rd3+2];");
    assert!(
        error.starts_with("line 19, block 0, warp 0, lanes 0xffffffff: ") && error.contains("not aligned"),
        "{error}"
    );
    let error = refused("mov.b32 %r2, 0;\nst.shared.u32 [%r2], %r1;");
    assert!(error.contains("4 bytes at 0 of shared memory"), "{error}");
    let error = refused("frob.b32 %r2, %r1;");
    assert_eq!(error, "line 19: `frob.b32`: is not understood");
    assert!(refused("trap;").contains("trap"));
}

/// Bytes land when the copy does, never before the phase is over; a second phase has the other parity.
#[test]
fn bulk_copies_land_before_their_phase_is_over() {
    let body = "mov.u32 %r2, words;\nmov.u32 %r3, phases;\nsetp.ne.b32 %p1, %r1, 0;\n@%p1 bra $wait;\n\
        mov.b32 %r4, 1;\nmbarrier.init.shared::cta.b64 [%r3], %r4;\nfence.mbarrier_init.release.cluster;\nmov.b32 %r5, 128;\n\
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], %r5;\n\
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], %r5, [%r3];\n\
        $wait:\nbar.warp.sync -1;\nmov.b32 %r6, 0;\n\
        $again:\n{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%r3], %r6;\nselp.u32 %r7, 1, 0, over;\n}\n\
        setp.eq.b32 %p2, %r7, 0;\n@%p2 bra $again;\nshl.b32 %r8, %r1, 2;\nadd.s32 %r9, %r2, %r8;\nld.shared.u32 %r10, [%r9];\n\
        add.s32 %r11, %r10, 1;\nst.global.b32 [%rd3], %r11;";
    for seed in 0..20 {
        let mut words: [u32; 32] = std::array::from_fn(|at| 100 + at as u32);
        let report = run("", body, 32, seed, &mut words).expect("it ends");
        assert_eq!(words, std::array::from_fn(|at| 101 + at as u32));
        assert_eq!(report.copies, 1);
    }
    let early = body.replace("%r6, 0;", "%r6, 1;");
    let mut words = [5; 32];
    run("", &early, 32, 3, &mut words).expect("the phase before the first is over");
    assert_eq!(words, [0; 32], "NaNs plus one: nothing had landed");
    let lost = body.replace("%r5, 128;", "%r5, 128;\nmov.b32 %r12, 64;").replace("[%rd1], %r5", "[%rd1], %r12");
    let error = run("", &lost, 32, 0, &mut [0; 32]).expect_err("64 bytes never come");
    assert!(what(error.clone()).contains("no end"), "{error}");
    let odd = body.replace("%r5, 128;", "%r5, 120;");
    assert!(what(run("", &odd, 32, 0, &mut [0; 32]).expect_err("refused")).contains("not all multiples of 16"));
}

/// The registers of a thread's sums of a product 64 columns wide.
fn sums_of_64() -> String {
    let sums: Vec<String> = (100..132).map(|at| format!("%r{at}")).collect();
    sums.join(", ")
}

/// Sums are in their registers once they have been waited for, and not before.
#[test]
fn sums_of_a_warpgroup_are_there_when_waited_for() {
    let sums = sums_of_64();
    let zero: String = (100..132).map(|at| format!("mov.b32 %r{at}, 0f3F000000;\n")).collect();
    // Both matrices are 64 rows of 16 ones, without swizzle: core matrices of 128 bytes, 128 and 256 apart.
    let fill = "mov.u32 %r2, words;\nshl.b32 %r3, %r1, 4;\nadd.s32 %r4, %r2, %r3;\nmov.b32 %r5, 0x3F803F80;\n\
        st.shared.v4.u32 [%r4], {%r5, %r5, %r5, %r5};\nfence.proxy.async.shared::cta;\nbar.sync 0, 128;\n\
        cvt.u64.u32 %rd4, %r2;\nshr.u64 %rd5, %rd4, 4;\nmov.b64 %rd6, 0x0000001000080000;\nor.b64 %rd7, %rd5, %rd6;\n";
    let multiply = format!(
        "wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{sums}}}, %rd7, %rd7, 1, 1, 1, 0, 0;\n\
         wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{sums}}}, %rd7, %rd7, 1, 1, 1, 0, 0;\n\
         wgmma.commit_group.sync.aligned;\n"
    );
    let wait = "wgmma.wait_group.sync.aligned 0;\n";
    let store = "st.global.b32 [%rd3], %r131;";
    for seed in 0..10 {
        let mut words = [0; 128];
        let body = format!("{fill}{zero}{multiply}{wait}{store}");
        let report = run("", &body, 128, seed, &mut words).expect("it ends");
        assert_eq!(words, [32.5_f32.to_bits(); 128], "seed {seed}");
        assert_eq!(report.products, [0, 8]);
        let body = format!("{fill}{zero}{multiply}{store}\n{wait}");
        run("", &body, 128, seed, &mut words).expect("it ends");
        assert!(words.iter().all(|word| f32::from_bits(*word).is_nan()), "seed {seed}");
    }
    let body = format!("{fill}{zero}{}{wait}", multiply.replace("wgmma.fence.sync.aligned;\n", ""));
    assert!(what(run("", &body, 128, 0, &mut [0; 128]).expect_err("refused")).contains("no wgmma.fence"));
}

/// Of a transposed matrix n is innermost, and the other one stands in registers, which nobody may write before it is
/// waited for.
#[test]
fn a_warpgroup_multiplies_registers_with_a_transposed_matrix() {
    let sums = sums_of_64();
    let zero: String = (100..132).map(|at| format!("mov.b32 %r{at}, 0;\n")).collect();
    // Row k of the matrix, 128 bytes, is 2^(k / 8) everywhere, so that its swizzle moves equals; a is all ones but for
    // rows g + 8 of columns 8 and on.
    let fill = "mov.u32 %r2, words;\nshl.b32 %r3, %r1, 4;\nadd.s32 %r4, %r2, %r3;\nmov.b32 %r5, 0x3F803F80;\n\
        setp.lt.u32 %p1, %r1, 64;\nselp.b32 %r6, %r5, 0x40004000, %p1;\n\
        st.shared.v4.u32 [%r4], {%r6, %r6, %r6, %r6};\nfence.proxy.async.shared::cta;\nbar.sync 0, 128;\n\
        cvt.u64.u32 %rd4, %r2;\nshr.u64 %rd5, %rd4, 4;\nmov.b64 %rd6, 0x4000004000000000;\nor.b64 %rd7, %rd5, %rd6;\nmov.b32 %r7, 0;\n";
    let multiply = format!(
        "wgmma.fence.sync.aligned;\n\
         wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{sums}}}, {{%r5, %r5, %r5, %r7}}, %rd7, 1, 1, 1, 1;\n\
         wgmma.commit_group.sync.aligned;\n"
    );
    let wait = "wgmma.wait_group.sync.aligned 0;\n";
    for (store, expected) in [("st.global.b32 [%rd3], %r128;", 24.0_f32), ("st.global.b32 [%rd3], %r131;", 8.0)] {
        for seed in 0..10 {
            let mut words = [0; 128];
            run("", &format!("{fill}{zero}{multiply}{wait}{store}"), 128, seed, &mut words).expect("it ends");
            assert_eq!(words, [expected.to_bits(); 128], "seed {seed}, {store}");
        }
    }
    for (early, kind) in [("%r5", "a product reads"), ("%r110", "of sums")] {
        let body = format!("{fill}{zero}{multiply}mov.b32 {early}, 0;\n{wait}");
        let error = what(run("", &body, 128, 0, &mut [0; 128]).expect_err("refused"));
        assert!(error.contains(kind) && error.contains("written before"), "{error}");
        let body = format!("{fill}{zero}{multiply}{wait}mov.b32 {early}, 0;\n");
        run("", &body, 128, 0, &mut [0; 128]).expect("it has been waited for");
    }
    let other = format!("{fill}{zero}{}{wait}", multiply.replace("%rd7, 1, 1, 1, 1;", "%rd7, 1, 1, 1, 2;"));
    assert!(what(run("", &other, 128, 0, &mut [0; 128]).expect_err("refused")).contains("not understood"));
}

/// A launch of `body` between two barriers of `threads` threads, behind the mark 7. Its first line is [`FIRST`].
fn between(body: &str, threads: u32) -> Report {
    assembled_between(None, body, threads)
}

/// Likewise, as this machine code.
fn assembled_between(assembled: Option<&Assembled>, body: &str, threads: u32) -> Report {
    let text = format!(
        "mov.u32 %r190, words;\nshl.b32 %r191, %r1, 2;\nadd.s32 %r192, %r190, %r191;\nshl.b32 %r193, %r1, 4;\n\
         add.s32 %r194, %r190, %r193;\nshl.b32 %r195, %r1, 7;\nadd.s32 %r196, %r190, %r195;\nmov.b32 %r199, 7;\n\
         st.volatile.global.b32 [%rd1], %r199;\nbar.sync 0, {threads};\n{body}\nbar.sync 0, {threads};"
    );
    run_with((InstructionCache::ENDLESS, assembled), "", &text, threads, 3, &mut [0]).expect("it ends")
}

const FIRST: u32 = 29;

/// Cycles of what stands between two barriers of `threads` threads, less those of nothing.
fn cycles(body: &str, threads: u32) -> u64 {
    let of = |body: &str| between(body, threads).cycles[&7][0];
    of(body) - of("")
}

#[test]
fn what_cycles_go_by_is_told_line_by_line() {
    let report = between("ld.shared.b32 %r2, [%r192];\nadd.s32 %r3, %r2, 1;\nadd.s32 %r4, %r3, 1;", 32);
    let spent = &report.spent[&7];
    assert_eq!(spent.get(&(FIRST, 0)), Some(&1), "its turn");
    assert_eq!(spent.get(&(FIRST + 1, FIRST)), Some(&28), "the load, but for its turn");
    assert_eq!(spent.get(&(FIRST + 2, FIRST + 1)), Some(&4));
    for (body, threads) in [("", 32), ("add.s32 %r2, %r1, 1;\nadd.s32 %r3, %r1, 2;\nadd.s32 %r4, %r1, 3;", 256)] {
        let report = between(body, threads);
        assert_eq!(
            report.spent[&7].values().sum::<u64>(),
            report.cycles[&7][0],
            "all of them, other warps' among them"
        );
    }
}

#[test]
fn a_chain_takes_its_latencies_and_what_stands_beside_it_none() {
    let chain = "add.s32 %r2, %r1, 1;\n".to_owned() + &"add.s32 %r2, %r2, 1;\n".repeat(9);
    assert_eq!(cycles(&chain, 32), 9 * 4, "the last one issues when the ninth is there");
    let beside: String = (3..20).map(|r| format!("add.s32 %r{r}, %r1, 1;\n")).collect();
    assert_eq!(cycles(&(chain.clone() + &beside), 32), 9 * 4, "issued while the chain waits");
    assert_eq!(cycles(&beside, 32), 17, "one a cycle");
    // Four schedulers: eight warps are two to each.
    assert_eq!(cycles(&beside, 128), 17);
    assert_eq!(cycles(&beside, 256), 34);
    let load = "ld.shared.b32 %r2, [%r192];\nadd.s32 %r3, %r2, 1;\n";
    assert_eq!(cycles(load, 32), 29);
    // Behind a branch everything waits for what it has asked, and for the branch.
    let branch = format!(
        "{load}setp.ne.b32 %p1, %r3, 7;\n@%p1 bra $on;\n$on:\nld.shared.b32 %r4, [%r192];\nadd.s32 %r5, %r4, 1;"
    );
    assert!(cycles(&branch, 32) >= 2 * 29 + 4 + 8, "{}", cycles(&branch, 32));
}

/// The cycles that a warp takes for `body` as machine code whose instructions come from these lines of it, and wait for
/// so long.
fn assembled_cycles(body: &str, instructions: &[(u32, u32)], threads: u32) -> u64 {
    let placed = instructions.iter().map(|(line, cycles)| (*line, *cycles, 0, 0)).collect::<Vec<_>>();
    boarded_cycles(body, &placed, threads)
}

/// The same of instructions that wait for scoreboards, too, and use one.
fn boarded_cycles(body: &str, instructions: &[(u32, u32, u8, u8)], threads: u32) -> u64 {
    let placed = |&(line, cycles, waits, uses): &(u32, u32, u8, u8)| MachineInstruction {
        line: FIRST + line,
        cycles,
        waits,
        uses,
    };
    let assembled = Assembled { instructions: instructions.iter().map(placed).collect() };
    let report = assembled_between(Some(&assembled), body, threads);
    assert_eq!(report.spent[&7].values().sum::<u64>(), report.cycles[&7][0]);
    // A barrier's.
    report.cycles[&7][0] - cycles_of_nothing()
}

fn cycles_of_nothing() -> u64 {
    assembled_between(Some(&Assembled::default()), "", 32).cycles[&7][0]
}

#[test]
fn machine_code_goes_in_its_order_and_waits_as_it_says() {
    let body = "ld.shared.b32 %r2, [%r192];\nadd.s32 %r3, %r2, 1;\nadd.s32 %r4, %r1, 1;";
    assert_eq!(
        assembled_cycles(body, &[(0, 2), (2, 4), (1, 5)], 32),
        29 + 5,
        "what is beside the load, then what waits for it"
    );
    assert_eq!(assembled_cycles(body, &[(0, 2), (1, 5), (2, 4)], 32), 29 + 5 + 4, "one after the other");
    assert_eq!(
        assembled_cycles(body, &[(0, 2), (2, 15), (2, 15), (1, 5)], 32),
        2 + 30 + 5,
        "two for one, and nothing to wait for"
    );
    // A name for what has been loaded is no instruction, and to be waited for like it.
    let named = "ld.shared.b32 %r2, [%r192];\nmov.b32 %r5, %r2;\nadd.s32 %r3, %r5, 1;";
    assert_eq!(assembled_cycles(named, &[(0, 2), (2, 4)], 32), 29 + 4);
    // Sums of arithmetic are there when the assembler says so. Of a scheduler's two warps one waits while the other
    // issues.
    let chain = "add.s32 %r2, %r1, 1;\nadd.s32 %r2, %r2, 1;";
    assert_eq!(assembled_cycles(chain, &[(0, 6), (1, 6)], 32), 12);
    assert_eq!(assembled_cycles(chain, &[(0, 6), (1, 6)], 256), 12);
    assert_eq!(assembled_cycles(chain, &[(0, 1); 20], 256), 40, "but both issue");
    // Nine instructions of which eight are a line of code.
    let lines = |instructions: usize| {
        let one = MachineInstruction { line: FIRST, cycles: 1, waits: 0, uses: 0 };
        let instructions = vec![one; instructions];
        let report = assembled_between(Some(&Assembled { instructions }), chain, 32);
        report.code[&7].iter().map(|word| word.count_ones()).sum::<u32>()
    };
    assert_eq!([lines(8), lines(9)], [1, 2]);
}

#[test]
fn machine_code_waits_for_all_that_uses_a_scoreboard() {
    // Two loads, and what reads the first of them.
    let body = "ld.shared.b32 %r2, [%r192];\nld.shared.b32 %r3, [%r194];\nadd.s32 %r4, %r2, 1;";
    let code = |loads: [(u8, u8); 2], waits| {
        let [(first, uses), (second, other)] = loads;
        boarded_cycles(body, &[(0, 1, first, uses), (1, 1, second, other), (2, 5, waits, 0)], 32)
    };
    // Lanes' words sixteen bytes apart are four times as many accesses, three cycles more.
    assert_eq!(code([(0, 1), (0, 2)], 1), 29 + 5, "each has its own");
    assert_eq!(code([(0, 1), (0, 1)], 1), 1 + 29 + 3 + 5, "both use one, so both are waited for");
    assert_eq!(code([(0, 1), (1, 1)], 1), 29 + 29 + 3 + 5, "the second waits for the first, which uses its scoreboard");
    assert_eq!(code([(0, 1), (0, 2)], 3), 1 + 29 + 3 + 5, "what nobody reads is waited for where the code says so");
    assert_eq!(code([(0, 1), (0, 2)], 0), 29 + 5, "and what is read in any case");
}

#[test]
fn a_warpgroups_products_are_waited_for_where_the_code_says_so() {
    let product = format!(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{}}}, %rd7, %rd7, 1, 1, 1, 0, 0;\n",
        sums_of_64()
    );
    let (fence, commit) = ("wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n");
    let matrix = "cvt.u64.u32 %rd4, %r190;\nshr.u64 %rd5, %rd4, 4;\nmov.b64 %rd6, 0x0000001000080000;\nor.b64 %rd7, %rd5, %rd6;\n";
    let body = |wait: &str| format!("{matrix}{fence}{product}{product}{commit}{wait}");
    // Lines 5 to 8 are the products, the commit and the wait.
    let code = [(5, 1), (6, 1), (7, 1), (8, 1)];
    let all = assembled_cycles(&body("wgmma.wait_group.sync.aligned 0;"), &code, 128);
    assert_eq!(all, 2 * 32 + 1, "from the first one's issue to the wait's");
    let none = assembled_cycles(&body("wgmma.wait_group.sync.aligned 1;"), &code, 128);
    assert_eq!(none, 4, "of one group one may be left");
}

#[test]
fn of_what_a_block_comes_to_again_the_last_time_counts() {
    let mark = |mark: u32| format!("mov.b32 %r199, {mark};\nst.volatile.global.b32 [%rd1], %r199;\nbar.sync 0, 32;\n");
    let chain = "add.s32 %r2, %r1, 1;\n".to_owned() + &"add.s32 %r2, %r2, 1;\n".repeat(9) + "bar.sync 0, 32;\n";
    let first_and_last = |first: &str, last: &str| {
        let text = [mark(7), first.to_owned(), mark(8), mark(7), last.to_owned()].concat();
        run("", &text, 32, 3, &mut [0]).expect("it ends").cycles[&7][0]
    };
    let end = "bar.sync 0, 32;\n";
    assert_eq!(first_and_last(&chain, end), first_and_last(end, end));
    assert!(first_and_last(end, &chain) >= first_and_last(end, end) + 9 * 4);
}

/// Two rounds of 1,024 instructions, 16 KiB, that wait for nothing else.
#[test]
fn code_that_is_not_held_is_waited_for_line_by_line() {
    let body = "mov.b32 %r199, 7;\nst.volatile.global.b32 [%rd1], %r199;\nbar.sync 0, 64;\nmov.b32 %r2, 0;\n$again:\n"
        .to_owned()
        + &"add.s32 %r3, %r1, 1;\n".repeat(1024)
        + "add.s32 %r2, %r2, 1;\nsetp.lt.u32 %p1, %r2, 2;\n@%p1 bra $again;\nbar.sync 0, 64;";
    let cycles = |kib, line_cycles| {
        let cache = InstructionCache { kib, line_cycles };
        run_with((cache, None), "", &body, 64, 3, &mut [0]).expect("it ends").cycles[&7][0]
    };
    let none = cycles(32, 0);
    assert_eq!(none, cycles(usize::MAX / 1024, 0));
    // 129 lines or 130, depending on where the first begins: once by the warp that comes first, or in each round.
    let per_line = |kib| (cycles(kib, 50) - none).div_ceil(50);
    assert!((128..=131).contains(&per_line(32)), "{}", per_line(32));
    assert!((256..=262).contains(&per_line(8)), "used last is not what comes next: {}", per_line(8));
}

#[test]
fn banks_give_a_word_at_a_time() {
    let loads = |address: &str, n: u32| -> String {
        let width = if n == 4 { ".v4" } else { "" };
        let to = |at: u32| {
            if n == 4 { format!("{{%r{}, %r{}, %r{}, %r{}}}", at, at + 1, at + 2, at + 3) } else { format!("%r{at}") }
        };
        (0..20).map(|i| format!("ld.shared{width}.b32 {}, [{address}];\n", to(2 + 4 * i))).collect()
    };
    // A warp's 128 bytes at once, 512 in four parts, and 32 words of one bank one by one.
    assert_eq!(cycles(&loads("%r192", 1), 256), 8 * 20, "32 neighbouring words");
    assert_eq!(cycles(&loads("%r190", 1), 256), 8 * 20, "the same word");
    assert_eq!(cycles(&loads("%r194", 4), 256), 8 * 20 * 4, "sixteen bytes a lane");
    assert_eq!(cycles(&loads("%r196", 1), 32), 20 * 32, "one bank");
    assert_eq!(
        cycles(&loads("%r196", 4), 32),
        20 * 32,
        "a quarter of a warp at a time, each lane's in the same four banks"
    );
}

#[test]
fn a_poll_takes_no_time_once_it_is_over() {
    let body = "mov.u32 %r3, phases;\nsetp.ne.b32 %p1, %r1, 0;\n@%p1 bra $wait;\nmbarrier.init.shared::cta.b64 [%r3], 1;\n\
        $wait:\nbar.sync 1, 64;\nsetp.lt.u32 %p2, %r1, 32;\n@%p2 bra $other;\n$again:\n\
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0;\n@%p3 bra $done;\nbra.uni $again;\n\
        $other:\nsetp.ne.b32 %p1, %r1, 0;\n@%p1 bra $done;\n";
    let wait = |before: u32| {
        let work = "add.s32 %r2, %r2, 1;\n".repeat(before as usize);
        cycles(&format!("{body}{work}mbarrier.arrive.shared::cta.b64 _, [%r3];\n$done:"), 64)
    };
    // The warp that asks does so until the other has done its work, whose chain is the longer by as much.
    assert_eq!(wait(100) - wait(50), 50 * 4);
}
