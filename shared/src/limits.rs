//! Every maximum of the image format, with the argument for it.

/// Tensor rank an [`Operand`](crate::Operand) can carry; a query of grouped attention has rows, groups, heads of a
/// group and dimensions.
pub const MAX_RANK: usize = 4;

/// Operands of one task. A product with all that can stand around it has ten, the most of any macro kernel.
pub const MAX_OPERANDS: usize = 12;

/// 32-bit words of macro kernel parameters in a task descriptor.
pub const PARAM_WORDS: usize = 8;

/// Workers of one image: more than twice the SMs of the largest GPU on sale.
pub const MAX_WORKERS: usize = 512;

/// Programs of one image: prefill chunk sizes in powers of two up to 4096, decode, and as many again to spare.
pub const MAX_PROGRAMS: usize = 32;

/// Tasks of one image. A million is two orders above Qwen3-8B; the bound keeps index arithmetic inside `u32`.
pub const MAX_TASKS: usize = 1 << 24;

/// Events one task waits on, and events it triggers: what its descriptor counts in 16 bits. A task of today's models
/// has ten at most.
pub const MAX_TASK_EVENTS: usize = u16::MAX as usize;

/// Token ids that end a generation, as `generation_config.json` lists them (Llama 3 has three).
pub const MAX_STOP_TOKENS: usize = 16;

/// Sequences decoded together: beyond it a pass over the weights is bound by arithmetic on every machine we know. Their
/// numbers, from 1, fit the upper byte of a task's flags.
pub const MAX_SEQUENCES: usize = 64;

const _: () = assert!(MAX_SEQUENCES <= 255);

/// Tokens guessed ahead and verified in one pass: of more than 16 rows a pass is bound by arithmetic on every CPU we
/// know, and a guess costs as much as a step.
pub const MAX_DRAFTS: usize = 15;
