//! The emitted PTX, judged as text and by ptxas: the miscompiles that were seen would show here.
//!
//! Without a device toolchain there is nothing to judge, which these tests say aloud; `./x test` installs one.

use crate::held::held;
use object::{Object, ObjectSection};
use perpetua::codegen::bodies::files;
use perpetua::codegen::plan::{Act, Scope, plan};
use perpetua::device_image::{DeviceImage, DeviceModule, device_image, device_kernels};
use perpetua::ptx::Module;
use perpetua_device::kernels::SPECS;
use perpetua_shared::body::PREFIX;
use std::path::Path;
use std::process::Command;

const WORKER: &str = perpetua_shared::launch::ENTRY;
const OPERATOR: &str = perpetua_shared::launch::OPERATOR;
const PROBE: &str = "perpetua_probe_barrier";
const COPIES: &str = "perpetua_probe_copy";

/// What may only get better silently. A block of this size may have 255 registers a thread; convergent instructions are
/// counted in the source after inlining, so a number that changes with no change in the kernels is a compiler that
/// copies barriers. Change a number together with the source that explains it. (The 128 sums of a warpgroup's products
/// take most of them, and what the loop holds over all bodies the rest. 252 before faults were recorded where they are
/// found, and not handed on; 255 while bodies were inlined before they were simplified; 254 while products of one row
/// held their first rows of weights, in 120 words; 250 before those that merge asked for splits of an attention while
/// they merge others, 253 before what is seldom run lay elsewhere, 250 before flagged elements were looked at in one
/// place, which is less code; 254 before functions were left to LLVM to inline, each simplified by then; 250 before who
/// takes a tile looked once whether it is there, and measured only where it is not, which is fewer cycles and less
/// code, and 254 before many rows' products found their outputs' operands once; 249 before a prompt's attention was a
/// warpgroup's, whose weights wait in registers of their own for the products that read those before.)
const REGISTERS: u32 = 252;

/// Barriers, two to a reduction: the start 1; triggers 2; tasks without triggers 1; a task that is fetched, in its turn
/// or just in time, 4: the record, and what a batch's sequence sees and has of it; attention 21 (parts 2; of few
/// queries 3; of wide heads a round's maxima and weights, the totals, and what comes after all warps' dimensions; of
/// many rows 2, for 64 dimensions and for 128, and of a share of the positions likewise; by a warpgroup the first
/// block's and the next ones', those who copy one, and an end); rope 2 (what all heads of some rows are turned by, and
/// the next rows'); advance 4 (what a pass that verifies drafts has chosen, what is asked, and the best place 2);
/// decode_attention 9 (heads, the turned queries, parts of a group's; of wide heads 4; of one by one 2); rms_norm 2,
/// where a row is alone; linear 45 and gated_linear 37 (a few rows', their activations, the sums' two and, in linear, a
/// row's squares; a norm 3, likewise, in linear, of what splits found; a long row 2; a warpgroup's products 26: for
/// each of five shapes, a step's of those who multiply and those who do not, the last step's of both, the sums' one;
/// and a part's end; and in linear, before what is made for a product after a norm where no warpgroup has multiplied,
/// 2); layer_norm 4; pool 2; argmax 2; causal_conv 1, before its state is written; recurrence 2, behind what is found
/// of rows and behind these rows; gated 2, where a head is alone; experts_up 15 (a row that is staged one by one 3, by
/// eight 3, what is made of it in 8 bits and in 4 by a table or without, the choice of experts 5, and a row's end) and
/// experts_down 8 (3 and 1, and a group's two in 8 bits and in 4); expert_routes 6 (the choice 5, a row's end);
/// routed_linear 18 (rows are counted 2, units 2, an expert's listed 2; of a warpgroup's products two shapes 10 and a
/// part's end; the end of one without); sample 52 (the text's tokens 2, the best 2, nine sums of count and mass 4 each,
/// walks 4 and 8). After a vote of those that wait before bodies, in a pass with just-in-time tasks, 2. In linear and
/// gated_linear 2 each for long rows in 8 bits, and in 4, by a table and without; and [those of a product of one
/// row](OF_ONE_ROW). Votes: waits of linear and gated_linear, of either in each of a warpgroup's five shapes and of a
/// few rows, of decode_attention, of a product of one row in four forms, of all other bodies, of a task that is left
/// out, and, before bodies, for a task and for the iteration; of tiles in vain where a pass begins, or the worker
/// leaves. Shuffles, five to a sum, twice that for two words: rms_norm 15 (three sums), layer_norm 10, pool 5, argmax
/// 10, rope 11 (a norm 5, one of values 5, and by fours a loop over lanes), attention 59 (11, of few queries a maximum
/// and a total 4, of wide heads likewise 4, and of many rows a maximum and a sum, over four lanes and of two rows, 8,
/// for two sizes, of all positions and of a share, and by a warpgroup), advance 10, decode_attention 29 (a norm 5, one
/// of values 5, a group's maximum and total 4, a wide one's 4, one by one 11), linear 150 and gated_linear 111 (of a
/// warpgroup's products the factors of rows, a loop over lanes, in each of five shapes, and in linear two rows' squares
/// 2; of a few rows' the factors, and in linear a row's squares 2; from global memory of one row and of four, from
/// tiles of one, a norm, and of a long row in each of its widths, by its form four, two or three, and one, twice, the
/// one before and the last, and in linear the best of its outputs 10), experts_up 65 (a norm, one by one and by eight,
/// what all experts make together, two products, and those of four forms of rows afar 40) and experts_down 15 (one by
/// one, in 8 bits and in 4), expert_routes 5, routed_linear 20 (units, three products), sample 175, recurrence 40
/// (three sums, sixteen sums at once 16, and nine corrections), gated 10 (a sum over a warp, and one over the block).
///
/// Warp syncs: where tiles are released, of a product of one row in each form a norm's weights, the loop's, and where
/// the wait fails; other rows of linear and gated_linear 2 each, and a norm's weights, 1, and a long one's first row of
/// weights and the next, of each width, in gated_linear the second matrix's, too: 20 and 10; what takes the tiles that
/// a body left, or that came in vain, 5; of a few rows the loop's, and where the wait fails, in linear and in
/// gated_linear; around outputs that lanes exchange, linear and gated_linear 2 each; before turned elements are put:
/// rope 2, decode_attention 1; around what a warp has of queries and results: attention 12, for two sizes, of all
/// positions and of a share.
const BARRIERS: usize = 242 + 2 * (2 + 2 + 2) + OF_ONE_ROW[0];
const BARRIER_VOTES: usize = 21 + 4;
const SHUFFLES: usize = 740 + OF_ONE_ROW[1];
const WARP_SYNCS: usize = 58 + 4 * 3;
const PRODUCTS: usize = 560 + 12;
const BYTE_PRODUCTS: usize = 12 + 2 * 40;

/// Of a product of one row, in bf16, 8 bits and 4, by a table and without: block barriers (the row, merged or as it is,
/// 2, the sums' two, and the best output's 2); shuffles (a norm's sum 5, the best output 10, totals of eight rows and
/// of sixteen 3; and a scale's maximum, of either kind of row, over eight lanes 3 and over sixteen 4); warp syncs where
/// none fails; products, of two chunks for eight rows and for sixteen, in the loop and of the last ones (in 4 bits by
/// two, and those of what sums begin with, once for each chunk that is asked for); waits for tiles' mbarriers, two
/// where some are taken and were not there yet: a norm's, the first ones, and the loop's two; and arrivals.
const OF_ONE_ROW: [usize; 6] = [4 * 6, 18 + 24 + 2 * 26, 4 * 2, 12 + 12 + 2 * 40, 4 * 8, 4 * 2];
/// By a warpgroup: of 64 x 128 x 16 four a step, twice that with both halves of the rows, and of narrower ones, of
/// which a step has two fours of columns, eight, in linear and in gated_linear; in routed_linear the first alone.
const GROUP_PRODUCTS: [usize; 4] = [36 + 4, 16 + 16, 16, 16];

/// Of each macro kernel alone, which is an entry of its own in `kernels.ptx`: registers at most; and, counted in the
/// source, block barriers, two of them behind the task's fetching, shuffles, warp syncs, tensor-core products; and
/// waits for tiles' mbarriers, two where one is taken and was not there yet (a norm's, those of products not in terms,
/// and of those in terms a step's and the next one's, which in gated_linear are two each; of a long row's the first and
/// the next, of four widths, in gated_linear of two, two each), and arrivals on them, one behind each warp sync but
/// two. Stack and spills are none. (attention_merge: a thread has eight elements' loads of four splits under way.
/// rms_norm: of a row 32 elements, their weights, and what they are added to. rope: the next head's elements and all
/// factors, asked for before a head is turned. advance: it tells the host, too, goes on with a batch, and looks for
/// what the text said before. decode_attention: 64 sums, and 48 words of keys and values; 196 before heads could be
/// turned in part. attention, of few queries: as decode_attention; 189 when they were taken as many rows are, with 64
/// sums and a tile of scores. linear: 230 before it asked once, for all its ways, which form its weights have; 233
/// before it asked for splits of an attention while it merges others. Before flagged elements were looked at in one
/// place, linear 242, gated_linear 205, decode_attention 204, and experts_up 181. Before functions were left to LLVM to
/// inline, linear 245, gated_linear 222, rope 108, attention 213. Before many rows' outputs had their operands found
/// once, linear 238, and before two rows of them were finished together 244, and gated_linear 218; before it wrote
/// pairs, rope 110. Before an expert could count by its logit alone, experts_up 167 and expert_routes 38. Before
/// residuals were asked for ahead of a row's staging, linear 238. Before heads of up to 256 elements could be turned in
/// part, rope 116. Before the levels of weights in 4 bits were a table in registers, by their type, and rows of no
/// whole lines were filled up, embedding 63, experts_up 168, and experts_down 127; before experts had biases, which are
/// asked for ahead, 171 and 136; before they could be chosen by corrected sigmoids, 177 and 142, and expert_routes 40;
/// before they had scales, experts_down 145. Before whole numbers of 4 bits, gated_linear 224. Before values were
/// normalised, decode_attention 210. recurrence: eight rows of a state, 32 words.)
type Figures = (&'static str, u32, usize, usize, usize, usize, [usize; 2]);

/// Of all of them.
const KERNELS: &[Figures] = &[
    ("embedding", 64, 2, 0, 0, 0, [0, 0]),
    ("rms_norm", 164, 4, 15, 0, 0, [0, 0]),
    ("linear", 242, 77, 244, 31, 128, [78, 29]),
    ("gated_linear", 226, 69, 205, 21, 128, [106, 19]),
    ("rope", 118, 4, 11, 2, 0, [0, 0]),
    // Two registers more since heads may be wide.
    ("attention", 219, 23, 59, 12, 432, [0, 0]),
    ("layer_norm", 60, 6, 10, 0, 0, [0, 0]),
    // Four registers more since rows may be multiplied by their positions.
    ("elementwise", 40, 2, 0, 0, 0, [0, 0]),
    ("select_row", 22, 2, 0, 0, 0, [0, 0]),
    ("argmax", 26, 4, 10, 0, 0, [0, 0]),
    ("sample", 54, 54, 175, 0, 0, [0, 0]),
    ("advance", 40, 6, 10, 0, 0, [0, 0]),
    ("pool", 36, 4, 5, 0, 0, [0, 0]),
    ("attention_merge", 116, 2, 0, 0, 0, [0, 0]),
    ("decode_attention", 212, 11, 29, 1, 80, [0, 0]),
    ("experts_up", 179, 17, 65, 0, 0, [0, 0]),
    ("experts_down", 147, 10, 15, 0, 0, [0, 0]),
    ("expert_routes", 52, 8, 5, 0, 0, [0, 0]),
    ("routed_linear", 182, 20, 20, 0, 0, [0, 0]),
    ("slot_sum", 48, 2, 0, 0, 0, [0, 0]),
    ("causal_conv", 38, 3, 0, 0, 0, [0, 0]),
    ("recurrence", 113, 4, 40, 0, 0, [0, 0]),
    ("gated", 62, 4, 10, 0, 0, [0, 0]),
];

fn image() -> Option<&'static DeviceImage> {
    let image = device_image();
    if image.is_none() {
        println!("skipped: no device toolchain when this was built (./x setup installs one)");
    }
    image
}

/// The module of the persistent kernel and the probes.
fn ptx() -> Option<&'static str> {
    image().map(|image| image.worker.ptx())
}

/// The text of entry `name`: its head (parameters and directives) and its body.
fn entry<'a>(ptx: &'a str, name: &str) -> (&'a str, &'a str) {
    let start = ptx.find(&format!(".entry {name}(")).unwrap_or_else(|| panic!("no entry {name}"));
    let body = start + ptx[start..].find("\n{").expect("an entry has a body");
    let end = body + ptx[body..].find("\n}").expect("a body ends");
    (&ptx[start..body], &ptx[body..end])
}

/// Instructions of `body` whose opcode starts with one of `opcodes`; a predicate before it does not hide it.
fn count(body: &str, opcodes: &[&str]) -> usize {
    let instructions = body.lines().map(|line| {
        let line = line.trim_start();
        if line.starts_with('@') {
            line.split_once(char::is_whitespace).map_or("", |(_, rest)| rest.trim_start())
        } else {
            line
        }
    });
    instructions.filter(|line| opcodes.iter().any(|opcode| line.starts_with(opcode))).count()
}

fn barriers(body: &str) -> usize {
    count(body, &["bar.sync", "barrier.sync", "barrier.cta.sync", "bar.cta.sync"])
}

/// The law the probe entry exists for.
fn check_probe(ptx: &str) -> Result<(), String> {
    match barriers(entry(ptx, PROBE).1) {
        1 => Ok(()),
        n => Err(format!("{n} barriers in {PROBE}, whose source has 1")),
    }
}

#[test]
fn everything_that_is_embedded_is_understood() {
    let Some(image) = image() else { return };
    for code in image.modules() {
        let module = Module::parse(code.ptx()).expect("the kernels");
        assert!(module.entries().any(|name| name == code.entry));
    }
    if let Some(kernels) = device_kernels() {
        Module::parse(kernels).expect("every macro kernel alone");
    }
}

#[test]
fn barriers_are_neither_copied_nor_lost() {
    let Some(ptx) = ptx() else { return };
    check_probe(ptx).expect("barrier duplication");

    let (_, body) = entry(ptx, WORKER);
    let got = [
        barriers(body),
        count(body, &["bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red"]),
        count(body, &["shfl.sync"]),
    ];
    println!("{WORKER}: {} barriers, {} barrier votes, {} shuffles", got[0], got[1], got[2]);
    assert_eq!(
        got,
        [BARRIERS, BARRIER_VOTES, SHUFFLES],
        "barriers, votes and shuffles of {WORKER}: does the source explain the change?"
    );
    assert_eq!(count(body, &["bar.warp.sync"]), WARP_SYNCS);
    // Lanes that merge parts of a row in 8 bits or in 4, and shuffle, ask together what is there, and whether to look
    // again.
    assert_eq!(count(body, &["redux.sync.or"]), 2 * 3);
    // Of many rows four fragments of rows by two of columns, twice a step of k, in linear and in gated_linear. Of one
    // row see `OF_ONE_ROW`. Of a few rows four of two chunks, in the loop and of the last ones, in either. In
    // decode_attention, and in attention of few queries, four for each 32 dimensions of queries and keys, one for each
    // eight of values; of wide heads, in either, so for 256 dimensions at a time, and for two chunks of 64 of values.
    // In attention of many rows, in two terms: of 64 dimensions 32 for 64 scores, of a group of 32 in the loop, and 64
    // for the sums; of 128 16, for 32 scores, and 64; and all of that once more of a share of the positions.
    assert_eq!(count(body, &["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]), PRODUCTS);
    assert_eq!(count(body, &["mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"]), BYTE_PRODUCTS);
    let products = ["m64n128k16", "m64n64k16", "m64n32k16", "m64n16k16"]
        .map(|shape| format!("wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16"));
    assert_eq!(products.map(|opcode| count(body, &[&opcode])), GROUP_PRODUCTS);
    // Each with one fence and one commit around a step's; a wait after it, and one for each half's sums at the end.
    let around = ["wgmma.fence", "wgmma.commit_group", "wgmma.wait_group"].map(|opcode| count(body, &[opcode]));
    // Attention has three: the first scores, the next ones and those of values; and takes scores twice, and sums.
    assert_eq!(around, [12 + 3, 12 + 3, 12 + 15 + 4]);
    // Past L1 goes what others write or the host does, and nothing of the launch block: seven words of the step, two of
    // a batch's sequence where a task is fetched, in its turn or just in time, tokens, and the control words that tasks
    // read; of guesses, what was chosen and what had been guessed, the tokens compared, of which one is the text's
    // last, and what followed; of a penalty its word, and the text's tokens.
    assert_eq!(count(body, &["ld.volatile"]), 27);
    // The loader's copies: of its pass, and ahead of the next.
    assert_eq!(count(body, &["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"]), 2);
    assert_eq!(count(body, &["mbarrier.arrive.expect_tx.shared::cta.b64"]), 2);
}

/// The operators' entry has the kernels' bodies, each once, a loader for one task's tiles, and neither waits nor
/// triggers.
#[test]
fn an_operator_alone_has_the_bodies_and_no_more() {
    let Some(image) = image() else { return };
    let (_, body) = entry(image.operator.ptx(), OPERATOR);
    // Behind two of each kernel's barriers a task is fetched: one fetches for all of them, behind the barrier that all
    // threads come to.
    let of_kernels = KERNELS.iter().fold([3, 0, 0, 0, 0, 0], |sum, kernel| {
        let &(_, _, barriers, shuffles, warp_syncs, products, [looks, arrivals]) = kernel;
        let of_one = [barriers - 2, shuffles, warp_syncs, products, looks, arrivals];
        std::array::from_fn(|i| sum[i] + of_one[i])
    });
    let got = [
        barriers(body),
        count(body, &["shfl.sync"]),
        count(body, &["bar.warp.sync"]),
        count(body, &["mma.sync"]),
        count(body, &["mbarrier.try_wait"]),
        count(body, &["mbarrier.arrive"]),
    ];
    // A tile that a body has left is waited for and released; a loader waits for room, and says how many bytes will
    // come.
    let beside = [0, 0, 1, 0, 2 + 2, 1 + 1];
    // A product of one row is there once, in either kernel's entry and here.
    assert_eq!(got, std::array::from_fn(|i| of_kernels[i] + beside[i] - OF_ONE_ROW[i]));
    assert_eq!(
        count(body, &["bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red", "ld.acquire", "red.release"]),
        0
    );
    assert_eq!(count(body, &["ld.local", "st.local", "call"]), 0);
}

#[test]
fn the_barrier_check_can_fail() {
    let Some(ptx) = ptx() else { return };
    let (_, body) = entry(ptx, PROBE);
    let line = body.lines().find(|line| barriers(line) == 1).expect("the probe's barrier");
    let copied = ptx.replace(body, &body.replace(line, &format!("{line}\n@%p1 {}", line.trim())));
    assert_eq!(check_probe(&copied), Err(format!("2 barriers in {PROBE}, whose source has 1")));
    let lost = ptx.replace(body, &body.replace(line, ""));
    assert!(check_probe(&lost).is_err());
}

#[test]
fn nothing_is_read_past_the_coherent_cache() {
    let Some(image) = image() else { return };
    // What one worker writes another reads in the same launch, so a non-coherent load is wrong for all but weights; the
    // weight loads are coherent too (`ld.global.L1::no_allocate`).
    for ptx in image.modules().map(DeviceModule::ptx) {
        let nc: Vec<&str> =
            ptx.lines().filter(|line| line.contains("ld.global.nc") || line.contains("ldu.global")).collect();
        assert!(nc.is_empty(), "non-coherent loads: {nc:?}");
        assert!(count(ptx, &["ld.global.L1::no_allocate.v4"]) > 0, "weights are streamed 16 bytes at a time");
    }
}

#[test]
fn counters_are_released_and_acquired() {
    let Some(ptx) = ptx() else { return };
    let (_, body) = entry(ptx, WORKER);
    assert!(count(body, &["red.release.gpu.global.add.u32"]) > 0);
    assert!(count(body, &["ld.acquire.gpu.global.u32"]) > 0);
    // What `core`'s atomics would compile to, which orders nothing.
    assert_eq!(count(body, &["atom.global", "atom.add", "red.global"]), 0);
}

#[test]
fn the_entry_promises_its_launch() {
    let Some(image) = image() else { return };
    let threads = perpetua_shared::launch::BLOCK_THREADS;
    for (module, name) in image.modules().into_iter().zip([WORKER, OPERATOR]) {
        let (head, _) = entry(module.ptx(), name);
        assert!(head.contains(&format!(".maxntid {threads}, 1, 1")), "{head}");
        assert!(head.contains(".minnctapersm 1"), "{head}");
        assert!(head.contains(".pragma \"nounroll\";"), "{head}");
        // The launch block, by value.
        let bytes = size_of::<perpetua_shared::launch::LaunchParams>();
        assert!(head.contains(&format!(".b8 {name}_param_0[{bytes}]")), "{head}");
        assert!(module.ptx().contains(".target sm_90a"));
    }
}

#[test]
fn a_panic_is_a_trap() {
    let Some(image) = image() else { return };
    // Calls would need a stack; a panic on the device has no reader.
    for module in image.modules() {
        assert_eq!(count(module.ptx(), &["call"]), 0, "everything is inlined");
    }
    assert!(count(entry(image.worker.ptx(), WORKER).1, &["trap"]) > 0, "a loader that waits in vain traps");
}

/// What ptxas says of a kernel that has shared memory beside what the launch gives: then addresses would not be those
/// that the code takes them to be.
const SHARED_UNASKED: &str = " bytes smem";

/// What ptxas says of `ptx`.
fn said_of(ptx: &str, ptxas: &str) -> String {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("perpetua.ptx");
    std::fs::write(&path, ptx).expect("written");
    let output = Command::new(ptxas)
        .args(["-v", "-arch=sm_90a", "-o"])
        .arg(dir.path().join("perpetua.cubin"))
        .arg(&path)
        .output()
        .expect("ptxas runs");
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{report}");
    report
}

/// Whether ptxas did not take what it got as it was. C7508 to C7519: setmaxnreg ignored, wgmma serialised; warnings to
/// some versions, information to others.
fn complains(report: &str) -> bool {
    ["warning", "(C75", "Performance Loss"].iter().any(|said| report.contains(said))
}

/// Reads a sum of a warpgroup's product before it has been waited for: ptxas waits on its own, and says so.
const UNAWAITED: &str = "
.version 8.1
.target sm_90a
.address_size 64
.visible .entry unawaited(.param .u64 to, .param .u64 matrix) {
    .reg .f32 %f<4>;
    .reg .b64 %r<2>;
    ld.param.u64 %r0, [to];
    ld.param.u64 %r1, [matrix];
    mov.f32 %f0, 0f00000000;
    mov.f32 %f1, 0f00000000;
    mov.f32 %f2, 0f00000000;
    mov.f32 %f3, 0f00000000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %r1, %r1, 1, 1, 1, 0, 0;
    add.f32 %f0, %f0, %f1;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    st.global.f32 [%r0], %f0;
    ret;
}
";

#[test]
fn what_ptxas_complains_of_is_heard() {
    let Some(ptxas) = ptxas() else { return };
    let report = said_of(UNAWAITED, &ptxas);
    assert!(complains(&report), "{report}");
}

/// The number before `unit` in what ptxas says of entry `name`; 0 if it says none.
fn figure(report: &str, name: &str, unit: &str) -> u32 {
    let (_, of_entry) = report.split_once(&format!("for {name}\n")).unwrap_or_else(|| panic!("{name}: {report}"));
    let line = of_entry.lines().find(|line| line.contains("Used ")).expect("ptxas reports registers");
    let Some((before, _)) = line.split_once(unit) else { return 0 };
    before.trim_end().rsplit(' ').next().and_then(|number| number.parse().ok()).expect("a number")
}

/// Words that are live where the worker chooses among bodies. (Counters, the control block, faults and the bound of
/// waits, by address or value, 8; who it is, 3; the step 5, and what the body sees of it 5; tiles 5; places in lists
/// and what is launched just in time 8; of the next task's record the thread's word 1; and what an instruction of its
/// own may make anew, among it since there are a hundred places of them the addresses of a fault's five words, and
/// where a task's record begins. 86 before faults were recorded where they are found; 51 before a task's record was
/// asked for while the one before it runs.)
const HELD: u32 = 59;

#[test]
fn what_is_held_over_all_bodies_keeps_to_its_figure() {
    let Some(ptx) = ptx() else { return };
    let held = held(entry(ptx, WORKER).1);
    println!("{held} words held over all bodies");
    assert!((20..=HELD).contains(&held), "{held} words held over all bodies, {HELD} before");
}

#[test]
fn each_kernel_keeps_to_its_figures() {
    let Some(ptx) = device_kernels() else { return };
    let report = ptxas().map(|ptxas| said_of(ptx, &ptxas));
    if let Some(report) = &report {
        assert!(!complains(report), "{report}");
        assert!(!report.contains(SHARED_UNASKED), "{report}");
    }
    let mut names: Vec<&str> = KERNELS.iter().map(|kernel| kernel.0).collect();
    let entries = ptx.matches(".visible .entry perpetua_kernel_").count();
    assert_eq!((entries, names.len()), (SPECS.len(), SPECS.len()), "a row for each kernel");
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), entries, "a kernel has two rows");
    let (mut over, mut other) = (Vec::new(), Vec::new());
    for &(name, registers, block_barriers, shuffles, warp_syncs, products, tiles) in KERNELS {
        let name = format!("perpetua_kernel_{name}");
        let (_, body) = entry(ptx, &name);
        let mma = count(body, &["mma.sync"]);
        let got = (barriers(body), count(body, &["shfl.sync"]), count(body, &["bar.warp.sync"]), mma);
        let used = report.as_ref().map_or(0, |report| figure(report, &name, " registers"));
        println!("(\"{}\", {used}, {}, {}, {}, {}, ..),", &name[16..], got.0, got.1, got.2, got.3);
        let before = (block_barriers, shuffles, warp_syncs, products);
        other.extend((got != before).then(|| format!("{name}: {got:?}, {before:?} before")));
        let of_tiles = [count(body, &["mbarrier.try_wait"]), count(body, &["mbarrier.arrive"])];
        assert_eq!(of_tiles, tiles, "{name}: waits for barriers of tiles, and arrivals");
        assert_eq!(count(body, &["ld.global.nc", "ldu.", "call", "ld.local", "st.local"]), 0, "{name}");
        if report.is_some() {
            over.extend((used > registers).then(|| format!("{name}: {used} registers, {registers} before")));
        }
    }
    assert!(
        other.is_empty(),
        "barriers, shuffles, warps' barriers, products: does the source explain the change? {other:#?}"
    );
    assert!(over.is_empty(), "{over:#?}");
    let Some(report) = report else { return };
    let frames = report.lines().filter(|line| line.contains("bytes stack frame"));
    for line in frames {
        assert_eq!(line.trim(), "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", "{report}");
    }
}

/// A generated body that stands alone has the barriers that were planned, no more and no fewer.
#[test]
fn generated_bodies_have_the_barriers_of_their_plans() {
    let Some(ptx) = device_kernels() else { return };
    let alone = perpetua_device::gpu::bodies::NAMES;
    let files = files().into_iter().filter(|file| file.path.starts_with("device/src/gpu/bodies/"));
    let bodies = files.flat_map(|file| file.bodies).filter(|body| alone.contains(&body.name.as_str()));
    let mut n = 0;
    for body in bodies {
        let (name, plan) = (format!("{PREFIX}{}", body.name), plan(&body));
        let planned = |scope| {
            let is_it = |path: &Vec<usize>| matches!(plan.act(path), Some(Act::Meet(found)) if *found == scope);
            plan.paths().iter().filter(|path| is_it(path)).count()
        };
        let (_, text) = entry(ptx, &name);
        assert_eq!(barriers(text), planned(Scope::Block), "{name}");
        assert_eq!(count(text, &["bar.warp.sync"]), planned(Scope::Warp), "{name}");
        assert_eq!(count(text, &["ld.global.nc", "ldu.", "call", "ld.local", "st.local"]), 0, "{name}");
        n += 1;
    }
    assert_eq!(n, alone.len(), "a plan for each");
}

#[test]
fn copies_barriers_and_products_are_the_instructions_meant() {
    let Some(ptx) = ptx() else { return };
    let (_, body) = entry(ptx, COPIES);
    for (opcode, n) in [
        ("mbarrier.init.shared::cta.b64", 2),
        ("fence.mbarrier_init.release.cluster", 1),
        ("cp.async.bulk.prefetch.L2.global", 1),
        ("fence.proxy.async.global", 1),
        ("mbarrier.arrive.expect_tx.shared::cta.b64", 1),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", 1),
        ("mbarrier.try_wait.parity.shared::cta.b64", 1),
        ("mbarrier.arrive.shared::cta.b64", 1),
        ("bar.warp.sync", 1),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", 1),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 1),
        ("ld.shared.v4.u32", 2),
        ("st.shared.v4.u32", 1),
        ("ld.shared.u16", 1),
    ] {
        assert_eq!(count(body, &[opcode]), n, "{opcode}");
    }
    assert_eq!(barriers(body), 1);
    assert!(body.contains("bar.sync") || body.contains("barrier"), "{body}");
}

fn ptxas() -> Option<String> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/ptxas/bin/ptxas");
    let candidates =
        [std::env::var("PERPETUA_PTXAS").ok(), Some(built.display().to_string()), Some("ptxas".to_string())];
    let found = candidates
        .into_iter()
        .flatten()
        .find(|name| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success()));
    if found.is_none() {
        println!("skipped: no ptxas (./x setup fetches one)");
    }
    found
}

/// A program that was built where there is a ptxas carries what that made.
#[test]
fn a_cubin_is_embedded() {
    let (Some(image), Some(ptxas)) = (device_image(), ptxas()) else { return };
    for module in image.modules() {
        let is_assembled = module.cubin().is_some() && module.ptxas_report().is_some();
        assert!(is_assembled, "there is {ptxas}, but the build found none");
    }
}

/// Attention finds weights, by exponentials, while tensor cores make the next scores: so it says, but ptxas is free to
/// wait for these first, and did.
#[test]
fn exponentials_stand_before_what_waits_for_products() {
    // By the lowest twelve bits of a machine instruction, of two words, as nvdisasm names them; what a warpgroup waits
    // with has a bit beside.
    const PRODUCT: u64 = 0x9f0;
    const SPECIAL_FUNCTION: u64 = 0x308;
    const WARPGROUP: u64 = 0x9c5;
    const WAITS: u64 = 1 << 47;
    let Some(cubin) = device_image().and_then(|image| image.worker.cubin()) else {
        println!("skipped: no cubin in this build (./x setup fetches ptxas)");
        return;
    };
    let file = object::File::parse(cubin).expect("an ELF file");
    let section = file.section_by_name(&format!(".text.{WORKER}")).expect("the kernel's code");
    let code = section.data().expect("in the file");
    let (mut since_product, mut most, mut waits) = (None, 0, 0);
    for instruction in code.chunks_exact(16) {
        let word = u64::from_le_bytes(*instruction.first_chunk().expect("two words"));
        match word & 0xfff {
            PRODUCT => since_product = Some(0),
            SPECIAL_FUNCTION => since_product = since_product.map(|n| n + 1),
            WARPGROUP if word & WAITS != 0 => {
                (most, waits) = (most.max(since_product.take().unwrap_or(0)), waits + 1);
            }
            _ => {}
        }
    }
    assert!(waits > 20, "{waits} waits for products: machine code is read as it is not");
    assert!(
        most >= 32 + 2,
        "{most} exponentials, of 32 weights and two factors a thread, stand before what waits for products"
    );
}

#[test]
fn ptxas_accepts_it_without_spills() {
    let Some(image) = image() else { return };
    // As it said when it made the cubins, which takes two minutes each.
    let [Some(worker), Some(operator)] = image.modules().map(DeviceModule::ptxas_report) else {
        println!("skipped: no ptxas when this was built (./x setup fetches one)");
        return;
    };
    let report = [worker, operator].concat();
    println!("{report}");
    assert!(!complains(&report), "{report}");
    let mut functions = 0;
    for line in report.lines().filter(|line| line.contains("bytes stack frame")) {
        functions += 1;
        assert_eq!(line.trim(), "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", "{report}");
    }
    assert_eq!(
        functions, 10,
        "the kernel, its operators alone, six probes, two entries that nobody launches, and nothing else: {report}"
    );
    assert!(!report.contains(SHARED_UNASKED), "{report}");
    let registers = figure(&report, WORKER, " registers");
    assert!(registers <= REGISTERS, "{registers} registers, {REGISTERS} before");
}
