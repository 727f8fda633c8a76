//! What `gpu-check kernels` runs: small networks, and which of their intermediates it compares. Together they have
//! every macro kernel ([`uncovered`]).

use perpetua::EngineError;
use perpetua::Model;
use perpetua::compile::{CompileError, Compiled, Source};
use perpetua::engine::{declared, decoder_sources, sentence_sources};
use perpetua::graph::kernel::{EmbeddingArgs, ExpertArgs, GraphError, KernelGraph, Operator};
use perpetua::graph::tensor::{BufferKind, TensorId, TensorTable};
use perpetua::model::Quantize;
use perpetua::model::decoder::{BuildError, Cache, Head};
use perpetua_device::kernels::elementwise::Function;
use perpetua_device::kernels::gated_linear::Gating;
use perpetua_device::kernels::linear::Activation;
use perpetua_device::kernels::routing::{Counting, Weighting};
use perpetua_device::kernels::{
    Attention, CausalConv, ExpertRoutes, ExpertsDown, ExpertsUp, Gated, GatedLinear, Linear, MacroKernel, Numbered,
    Recurrence, RoutedLinear, SPECS, Spec, Use, linear,
};
use perpetua_shared::DType;

/// The networks' sizes and weights: presets of `synth`.
pub(super) const PRESETS: [&str; 15] = [
    "tiny-qwen3",
    "tiny-qwen2",
    "tiny-llama",
    "tiny-mistral",
    "tiny-gemma3",
    "tiny-gemma4",
    "tiny-minicpm3",
    "tiny-qwen3.5",
    "tiny-lfm2",
    "tiny-granite4-h",
    "tiny-long",
    "tiny-large",
    "tiny-longest",
    "tiny-bert",
    "tiny-modernbert",
];

/// What an intermediate may be off where nothing is rounded: the cache is bf16, and differences grow from operator to
/// operator.
pub(super) const KERNEL_TOLERANCE: f64 = 2e-2;

/// The same where products round their input to bf16: those of many rows. The most that the PTX is off is 3.4e-2.
pub(super) const ROUNDED_TOLERANCE: f64 = 6e-2;

/// The same where weights in fewer bits are rounded to bf16, too. The most that the PTX is off is 5.7e-2, where without
/// that it is 3.4e-2.
const TWICE_ROUNDED_TOLERANCE: f64 = 1e-1;

/// The same of a network whose fourth layer attends to a few of its own: of 40 rows the PTX is off by 1.0e-1, an H200
/// by 9.3e-2, PyTorch in bf16 by 1.2e-1, and transformers in f32 by 6.7e-2 when nothing but what products read is
/// rounded to bf16 (tests/peers/rounding.py). So does one with norms behind states (Qwen3.5's), of which that costs
/// transformers 1.7e-2 to 1e-1 of a row's logits.
const AMPLIFIED_TOLERANCE: f64 = 1.5e-1;

/// The ways in which matrices are checked in fewer bits.
const FEWER_BITS: [Quantize; 2] = [Quantize::Q8, Quantize::Q4];

/// A pass over a network.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    network: Network,
    /// Rows of the pass.
    pub(super) rows: usize,
    /// How often it is run, over the tokens that follow.
    pub(super) passes: usize,
    /// How the model's matrices are in fewer bits, if they are.
    pub(super) quantize: Option<Quantize>,
    look: Look,
    /// Its rows, of several, are of a network that makes more of what rounding loses.
    amplifies: bool,
}

#[derive(Clone, Copy, Debug)]
enum Network {
    /// The model's, with a cache for so many positions.
    Model { context: usize },
    /// Operators that the models' passes have not, or not as something to look at.
    Others,
}

/// Which intermediates are outputs, to be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// All.
    Every,
    /// Those that stay when operators over one row are fused.
    Fused,
    /// What attention found, when the rotation is part of it.
    Attended,
    /// Those that stay f32 when a product of many rows would round them.
    Rounded,
}

/// An intermediate to compare.
#[derive(Clone, Debug)]
pub(super) struct Named {
    /// The output's name.
    pub(super) output: String,
    /// The operator's that writes it.
    pub(super) op: String,
    /// What it is a figure of; `None`: of the macro kernel that the compiler has it written by.
    of: Option<&'static str>,
}

/// What is run with `preset`'s model; on a simulated GPU, of 4 SMs, less.
pub(super) fn cases(preset: &str, is_simulated: bool) -> Vec<Case> {
    let whole = Network::Model { context: 128 };
    let amplifies = ["tiny-modernbert", "tiny-qwen3.5"].contains(&preset);
    let case = |network, rows: usize, passes, look| Case { network, rows, passes, look, quantize: None, amplifies };
    let quantized = |rows: usize, passes, look| {
        FEWER_BITS.map(|how| Case { quantize: Some(how), ..case(whole, rows, passes, look) })
    };
    if ["tiny-long", "tiny-large", "tiny-longest"].contains(&preset) {
        // Its long row is special in decoding alone, its heads' size in prompts, too.
        let (passes, prompt) = if is_simulated { (3, 20) } else { (20, 100) };
        let mut cases = vec![case(whole, 1, passes, Look::Fused), case(whole, prompt, 1, Look::Rounded)];
        cases.extend(quantized(1, passes, Look::Fused));
        return cases;
    }
    // With every tensor an output nothing is fused or rounded, so decoding, a row at a time, looks at those alone that
    // stay when it is, and so does a pass for the warpgroups.
    let every: &[usize] = if is_simulated { &[7] } else { &[1, 2, 7, 16, 40, 100] };
    let mut cases: Vec<Case> = every.iter().map(|rows| case(whole, *rows, 1, Look::Every)).collect();
    if ["tiny-bert", "tiny-modernbert"].contains(&preset) {
        return cases;
    }
    cases.extend(every.iter().flat_map(|rows| quantized(*rows, 1, Look::Every)));
    let (passes, fewer) = if is_simulated { (3, 3) } else { (120, 40) };
    cases.push(case(whole, 1, passes, Look::Fused));
    cases.extend(quantized(1, fewer, Look::Fused));
    let many: &[usize] = if is_simulated { &[20] } else { &[20, 60, 128] };
    cases.extend(many.iter().map(|rows| case(whole, *rows, 1, Look::Rounded)));
    cases.extend(many.iter().flat_map(|rows| quantized(*rows, 1, Look::Rounded)));
    // A short cache is not split among workers; of a longer one each has a share, where there are as many workers as
    // that.
    if preset == "tiny-llama" || !is_simulated {
        let short = Network::Model { context: 64 };
        cases.push(case(short, 1, if is_simulated { 3 } else { 60 }, Look::Attended));
        cases.push(case(whole, 1, if is_simulated { 3 } else { 120 }, Look::Attended));
    }
    if preset == "tiny-qwen3" {
        // Of one row, too: experts of several are other kernels'.
        let of_others = every.iter().chain(is_simulated.then_some(&1));
        cases.extend(of_others.map(|rows| case(Network::Others, *rows, 1, Look::Every)));
        cases.extend(many.iter().map(|rows| case(Network::Others, *rows, 1, Look::Rounded)));
        // Of experts alone: nothing else there has matrices.
        for rows in [1].iter().chain(many) {
            let of = |how| Case { quantize: Some(how), ..case(Network::Others, *rows, 1, Look::Rounded) };
            cases.extend(FEWER_BITS.map(of));
        }
    }
    cases
}

impl Case {
    /// What is run of `model`.
    pub(super) fn model(&self, model: &Model) -> Result<Model, EngineError> {
        self.quantize.map_or(Ok(model.clone()), |how| model.quantize(how, |_| {}))
    }

    /// The most that an intermediate may be off, as a part of the largest value of its tensor.
    pub(super) fn tolerance(&self) -> f64 {
        match self.rows {
            1 => KERNEL_TOLERANCE,
            _ if self.amplifies => AMPLIFIED_TOLERANCE,
            _ if self.quantize.is_some() => TWICE_ROUNDED_TOLERANCE,
            _ => ROUNDED_TOLERANCE,
        }
    }

    /// The graph, and which of its outputs are to be compared.
    pub(super) fn source(&self, model: &Model) -> Result<(Source, Vec<Named>), EngineError> {
        let mut source = match self.network {
            Network::Model { context } => {
                let cache = Cache { dtype: DType::Bf16, context, sequences: 1 };
                let sources = match model.decoder() {
                    Ok(_) => decoder_sources(model, &[self.rows], cache, Head::AllLogits)?,
                    Err(_) => sentence_sources(model, &[self.rows], cache)?,
                };
                sources.into_iter().next().ok_or(EngineError::Purpose("a pass"))?
            }
            Network::Others => {
                Source { name: "others".to_owned(), graph: others(model, self.rows)?, in_token_loop: false }
            }
        };
        let names = self.look_at(&mut source.graph).map_err(CompileError::Graph)?;
        Ok((source, names))
    }

    fn look_at(&self, graph: &mut KernelGraph) -> Result<Vec<Named>, GraphError> {
        let mut names = Vec::new();
        let ops: Vec<Operator> = graph.ops().cloned().collect();
        for op in &ops {
            let Some(spec) = Spec::of(op.kernel.task_type) else { continue };
            for (slot, tensor) in spec.slots.iter().zip(&op.slots) {
                let Some(tensor) = tensor.filter(|_| slot.usage != Use::Read) else { continue };
                let kind = &graph.table.buffers[graph.table[tensor].buffer.idx()].kind;
                let is_seen = match self.look {
                    Look::Every => matches!(kind, BufferKind::Intermediate | BufferKind::State),
                    Look::Fused => stays_when_fused(&graph.table, &ops, op, tensor),
                    Look::Attended => op.kernel.task_type == Attention::TASK_TYPE,
                    Look::Rounded => !is_read_by_a_product(&graph.table, &ops, tensor),
                };
                if is_seen {
                    let output = format!("check {} {}", op.name, slot.name);
                    graph.output(&output, tensor)?;
                    let of = match (self.quantize, self.look) {
                        (Some(Quantize::Q8), _) if self.rows == 1 => Some("decoding in 8 bits"),
                        (Some(Quantize::Q8), _) => Some("several rows in 8 bits"),
                        (Some(Quantize::Q4), _) if self.rows == 1 => Some("decoding in 4 bits"),
                        (Some(Quantize::Q4), _) => Some("several rows in 4 bits"),
                        (None, Look::Every) if is_of_experts(op) => None,
                        (None, Look::Every) => Some(spec.name),
                        (None, Look::Fused) => Some("decoding"),
                        (None, Look::Attended) => None,
                        (None, Look::Rounded) => Some("many rows"),
                    };
                    names.push(Named { output, op: op.name.clone(), of });
                }
            }
        }
        Ok(names)
    }
}

impl Named {
    /// What its figure is called where the pass was compiled to `compiled`.
    pub(super) fn figure(&self, compiled: &Compiled) -> &'static str {
        self.of.or_else(|| writer(compiled, &self.output)).unwrap_or("nobody")
    }
}

/// Element-wise functions, the row that a prompt's pass ends with, and a mixture of experts, which are the layers'
/// MLPs, with biases, rows of the embeddings: by logits that are the first elements of a row, so that a choice does not
/// hang on rounding.
fn others(model: &Model, rows: usize) -> Result<KernelGraph, EngineError> {
    let (name, config) = ("model.embed_tokens.weight", model.decoder()?);
    let shape = [config.vocab_size, config.hidden_size];
    let (n, k, experts) = (config.intermediate_size, config.hidden_size, config.n_layers);
    let weights = declared(model)?;
    let dtype = weights.dtype(name, &shape)?;
    let of_experts = weights.dtype("model.layers.0.mlp.gate_proj.weight", &[n, k])?;
    let build = || -> Result<KernelGraph, GraphError> {
        let mut graph = KernelGraph::with_rows(rows as u32);
        let tokens = graph.tokens(128)?;
        let table = graph.weight(name, &shape, dtype)?;
        let x = graph.embedding("embed", tokens, EmbeddingArgs::of(table))?;
        let sum = graph.elementwise("add", Function::Add, Activation::None, x, Some(x))?;
        let active = graph.elementwise("activate", Function::Activate, Activation::Gelu, sum, None)?;
        let product = graph.elementwise("mul", Function::Mul, Activation::None, active, Some(x))?;
        let gated = graph.elementwise("activate_mul", Function::ActivateMul, Activation::Silu, sum, Some(product))?;
        graph.select_row("last_row", gated)?;
        let logits = graph.view(x, 0, &[rows, experts], &[k, 1])?;
        let mut stack = |part: &str, shape| {
            graph.weight_stack(&format!("model.layers.*.mlp.{part}_proj.weight"), experts, shape, of_experts)
        };
        let (gate, up, down) = (stack("gate", [n, k])?, stack("up", [n, k])?, stack("down", [k, n])?);
        let mut bias = |n: usize| graph.view(table, 0, &[experts, n], &[n, 1]);
        let biases = if dtype.is_float() { Some([bias(n)?, bias(n)?, bias(k)?]) } else { None };
        let gating = Gating { activation: Activation::None.number(), limit: 1.0, alpha: 1.702 };
        let (chosen, residual) = (2.min(experts), Some(x));
        let correction = if dtype.is_float() { Some(graph.view(table, 0, &[experts], &[1])?) } else { None };
        let counting = Counting { factor: 2.5, ..Counting::of(Weighting::Sigmoids) };
        let args = ExpertArgs { logits, correction, gate, up, down, biases, residual, chosen, counting, gating };
        graph.experts("experts", gated, args)?;
        Ok(graph)
    };
    Ok(build().map_err(BuildError::from)?)
}

/// The macro kernel whose task writes the output called `name` last.
fn writer(compiled: &Compiled, name: &str) -> Option<&'static str> {
    let (_, output) = compiled.programs[0].outputs.iter().find(|(known, _)| known == name)?;
    let view = compiled.image.view();
    let program = view.programs[0];
    let tasks = &view.tasks[program.task_first as usize..][..program.task_count as usize];
    let specs = tasks.iter().rev().filter_map(|task| Some((task, Spec::of(task.task_type)?)));
    // The first of its tasks begins where the tensor does.
    let mut writes = specs.filter(|(task, spec)| {
        let mut operands = spec.slots.iter().zip(view.operands(task));
        operands.any(|(slot, operand)| {
            slot.usage != Use::Read && (operand.binding, operand.offset_bytes) == (output.binding, output.offset_bytes)
        })
    });
    writes.next().map(|(_, spec)| spec.name)
}

/// Macro kernels that `has` no figure of, and nothing that is made of what they find.
pub(super) fn uncovered(has: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let is_in_another = |name: &str| name == ExpertRoutes::NAME && has(RoutedLinear::NAME);
    SPECS.iter().map(|spec| spec.name).filter(|name| !has(name) && !is_in_another(name)).collect()
}

/// Whether `op` is a mixture's, which passes of several rows have in other operators.
fn is_of_experts(op: &Operator) -> bool {
    matches!(op.kernel.task_type, ExpertsUp::TASK_TYPE | ExpertsDown::TASK_TYPE)
}

/// Whether one of `ops` is a product of `tensor`'s buffer, which with many rows is bf16 then.
fn is_read_by_a_product(table: &TensorTable, ops: &[Operator], tensor: TensorId) -> bool {
    let is_product =
        |op: &&Operator| is_of_experts(op) || matches!(op.kernel.task_type, Linear::TASK_TYPE | GatedLinear::TASK_TYPE);
    let of = table[tensor].buffer;
    ops.iter().filter(is_product).any(|op| op.slots[linear::slot::X].is_some_and(|x| table[x].buffer == of))
}

/// Whether `op`, one of `ops`, is a product, or of a layer that passes a state on, whose result `tensor` is what it
/// wrote at the end of the pass, fused or not: nobody turns it in place.
fn stays_when_fused(table: &TensorTable, ops: &[Operator], op: &Operator, tensor: TensorId) -> bool {
    let is_turned = |op: &Operator| {
        let slots = Spec::of(op.kernel.task_type).map_or(&[][..], |spec| spec.slots);
        let mut slots = slots.iter().zip(&op.slots);
        let same = |t: &Option<TensorId>| t.is_some_and(|t| table[t].buffer == table[tensor].buffer);
        slots.any(|(slot, t)| slot.usage == Use::Update && same(t))
    };
    let stays =
        [Linear::TASK_TYPE, GatedLinear::TASK_TYPE, CausalConv::TASK_TYPE, Recurrence::TASK_TYPE, Gated::TASK_TYPE];
    stays.contains(&op.kernel.task_type) && !ops.iter().any(is_turned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perpetua::compile::{Config, compile};
    use perpetua::graph::lower::Target;
    use perpetua::model::{SynthOptions, SynthSource, synth};
    use perpetua_device::kernels::{Advance, ArgmaxPartial, Sample};
    use std::collections::BTreeSet;
    use std::ops::ControlFlow;

    /// What chooses tokens, judged by them.
    const OF_TOKENS: [&str; 3] = [ArgmaxPartial::NAME, Sample::NAME, Advance::NAME];

    fn model(preset: &str) -> (tempfile::TempDir, Model) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let out = dir.path().join("model");
        synth(SynthSource::Preset(preset), &out, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(()))
            .expect("a preset");
        let model = Model::load(&out).expect("just written");
        (dir, model)
    }

    /// Compiled as for the check, every macro kernel has an intermediate that is compared, or makes the tokens that
    /// are.
    #[test]
    fn every_macro_kernel_is_checked() {
        for (is_simulated, sms) in [(true, 4), (false, 132)] {
            let mut figures: BTreeSet<&str> = OF_TOKENS.into();
            for preset in PRESETS {
                let (_dir, model) = model(preset);
                for case in cases(preset, is_simulated) {
                    let (source, names) = case.source(&case.model(&model).expect("a model")).expect("a network");
                    let compiled = compile(vec![source], &Config::new(Target::gpu(sms))).expect("it compiles");
                    assert!(!names.is_empty(), "{preset}, {case:?}: nothing is compared");
                    figures.extend(names.iter().map(|name| name.figure(&compiled)));
                }
            }
            assert_eq!(uncovered(|name| figures.contains(name)), Vec::<&str>::new(), "on {sms} SMs");
            assert!(!figures.contains("nobody"), "an output that no task writes");
            for bits in ["8 bits", "4 bits"] {
                let names = [format!("decoding in {bits}"), format!("several rows in {bits}")];
                assert!(names.iter().all(|name| figures.contains(&name[..])), "on {sms} SMs: {figures:?}");
            }
        }
        // The tokens' kernels are in what makes them.
        let (_dir, model) = model("tiny-qwen3");
        let sources = decoder_sources(&model, &[8], Cache::bf16(64), Head::Sample).expect("a network");
        let compiled = compile(sources, &Config::new(Target::gpu(4))).expect("it compiles");
        let run: BTreeSet<&str> =
            compiled.image.view().tasks.iter().filter_map(|task| Some(Spec::of(task.task_type)?.name)).collect();
        assert!(OF_TOKENS.iter().all(|name| run.contains(name)), "{run:?}");
    }

    #[test]
    fn a_macro_kernel_without_a_figure_is_named() {
        assert_eq!(uncovered(|name| name != "pool"), ["pool"]);
    }
}
