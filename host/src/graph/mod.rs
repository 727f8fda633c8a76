//! From what is computed to what waits for what.
//!
//! - [`tensor`]: buffers and the tensors that lie in them.
//! - [`kernel`]: the kernel graph, WHAT is computed: operators over tensors.
//! - [`lower`]: how far each operator is cut, for a target.
//! - [`threadblock`]: HOW each operator is cut into blocks, and which part of each tensor a block touches.
//! - [`flags`]: which intermediates need no events.
//! - [`task`]: one task per block, and the events that order them: WHAT WAITS for what.
//!
//! Nothing here knows CUDA, memory addresses or models.

pub mod flags;
pub mod kernel;
pub mod lower;
pub mod task;
pub mod tensor;
pub mod threadblock;
