//! What can be wrong with a model folder, in its user's words.
//!
//! One line each: the file, what in it, what was given, what was expected.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Why a model folder cannot be used, or one cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The operating system refused to read a file or folder.
    #[error("{}: cannot read: {}", path.display(), plain(source))]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The operating system refused to write a file or folder.
    #[error("{}: cannot write: {}", path.display(), plain(source))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The system gives no threads.
    #[error("cannot start a thread: {}", plain(.0))]
    Threads(std::io::Error),
    /// A file the folder must hold is not there.
    #[error("{}: no {what}", dir.display())]
    Absent {
        /// The folder.
        dir: PathBuf,
        /// The file or files looked for.
        what: String,
    },
    /// The path given as a model is not a folder.
    #[error("{}: not a folder; a model is a folder with config.json, tokenizer.json and model.safetensors", path.display())]
    NotAFolder {
        /// What was given.
        path: PathBuf,
    },
    /// A file that must be JSON is not.
    #[error("{}: not valid JSON: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said, with line and column.
        message: String,
    },
    /// A key of a JSON file is missing or has a value that makes no sense.
    #[error("{}: {key}: {given}, expected {expected}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key, dotted where nested.
        key: String,
        /// The value found, or `missing`.
        given: String,
        /// What would have been right.
        expected: String,
    },
    /// The file asks for something that exists but is not done here.
    #[error("{}: {what}: {given} is not supported; supported: {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key that asks.
        what: String,
        /// What it asks for.
        given: String,
        /// What it could ask for.
        supported: String,
    },
    /// A safetensors file or its index contradicts itself.
    #[error("{}: {message}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The checkpoint holds no tensor of this name.
    #[error("{name}: no such tensor in {}", path.display())]
    TensorAbsent {
        /// The tensor.
        name: String,
        /// The folder or file searched.
        path: PathBuf,
    },
    /// A tensor has another shape than the configuration implies.
    #[error("{name}: shape {}, expected {}", shape_text(given), shape_text(expected))]
    TensorShape {
        /// The tensor.
        name: String,
        /// Its shape in the file.
        given: Vec<usize>,
        /// The shape the configuration implies.
        expected: Vec<usize>,
    },
    /// The scales of a matrix in FP8 have a shape that does not say what shares one.
    #[error("{name}: shape {}, expected {expected}", shape_text(given))]
    ScaleShape {
        /// The scales.
        name: String,
        /// Their shape.
        given: Vec<usize>,
        /// What it may be.
        expected: String,
    },
    /// What a tensor cannot be read without.
    #[error("{name}: no such tensor, expected beside {beside}")]
    BesideAbsent {
        /// What is missing.
        name: String,
        /// What is there.
        beside: String,
    },
    /// A number in a tensor that numbers parts of another, beyond these.
    #[error("{name}: element {at} is {given}, expected less than {end}")]
    OutOfRange {
        /// The tensor.
        name: String,
        /// Which of its elements.
        at: usize,
        /// What it is.
        given: u32,
        /// How many parts there are.
        end: usize,
    },
    /// A tensor that describes another, in JSON, does not say something.
    #[error("{name}: no usable {what:?}, expected {expected}")]
    TensorSays {
        /// The tensor.
        name: String,
        /// What it should say.
        what: String,
        /// What would have been right.
        expected: &'static str,
    },
    /// A tensor's elements are of a type no kernel reads.
    #[error("{name}: dtype {given}, expected {expected}")]
    TensorDtype {
        /// The tensor.
        name: String,
        /// Its element type in the file.
        given: String,
        /// Those that are read.
        expected: &'static str,
    },
    /// Experts whose elements are of several types: they are one tensor.
    #[error("{name}: dtype {given}, expected that of the first expert, {expected}")]
    MixedExperts {
        /// The tensor.
        name: String,
        /// Its element type.
        given: perpetua_shared::DType,
        /// The first one's.
        expected: perpetua_shared::DType,
    },
    /// A weight that is to be had in fewer bits, or is in files, and is no number.
    #[error("{name}: element [{}, {}] is not finite: expected numbers, where weights are in fewer bits", at[0], at[1])]
    NotFinite {
        /// The tensor.
        name: String,
        /// Row and column.
        at: [usize; 2],
    },
    /// No memory for the copy of a tensor in fewer bits, or in another order.
    #[error("{name}: {bytes} bytes for a copy of it, which the system refuses")]
    NoMemory {
        /// The tensor.
        name: String,
        /// Asked.
        bytes: u64,
    },
    /// tokenizer.json cannot be used.
    #[error("{}: not a usable tokenizer: {message}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the tokenizer said.
        message: String,
    },
    /// A text could not be turned into tokens, or tokens into text.
    #[error("tokenizer: {message}")]
    Text {
        /// What the tokenizer said.
        message: String,
    },
    /// A token id beyond the model's vocabulary.
    #[error("token id {id} at position {position}: expected 0 to {}", vocab_size.saturating_sub(1))]
    TokenId {
        /// The id.
        id: u32,
        /// Where it stands among the given ids.
        position: usize,
        /// Ids the model knows.
        vocab_size: usize,
    },
    /// The folder has no chat template.
    #[error("{}: no chat template: neither chat_template.jinja nor a \"chat_template\" in tokenizer_config.json; give the prompt without chat", dir.display())]
    NoChatTemplate {
        /// The folder.
        dir: PathBuf,
    },
    /// The chat template is wrong, or refused the messages.
    #[error("{}: {message}", path.display())]
    ChatTemplate {
        /// Where the template comes from.
        path: PathBuf,
        /// What the template engine, or the template itself, said.
        message: String,
    },
    /// `synth` knows no such preset.
    #[error("preset {given}: unknown; known: {}", known.join(", "))]
    Preset {
        /// The name given.
        given: String,
        /// Every name there is.
        known: Vec<&'static str>,
    },
    /// A sentence model has no such prompt.
    #[error("prompt {given}: the model has none of this name, expected one of {}", known.join(", "))]
    Prompt {
        /// The name given.
        given: String,
        /// Every name there is.
        known: Vec<String>,
    },
    /// A folder to be written already holds something.
    #[error("{}: already exists and is not empty; give a folder that does not exist yet", path.display())]
    NotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// A checkpoint to be written is larger than what is free on its disk.
    #[error("{}: cannot write: its weights take {bytes} bytes, and {available} are free there", path.display())]
    NoSpace {
        /// The folder.
        path: PathBuf,
        /// Of the weights.
        bytes: u64,
        /// Free for this user.
        available: u64,
    },
    /// The caller asked to stop.
    #[error("stopped before the model was written; nothing was left behind")]
    Stopped,
}

impl ModelError {
    pub(crate) fn read(path: &Path, source: std::io::Error) -> Self {
        ModelError::Read { path: path.to_owned(), source }
    }

    pub(crate) fn write(path: &Path, source: std::io::Error) -> Self {
        ModelError::Write { path: path.to_owned(), source }
    }

    pub(crate) fn checkpoint(path: &Path, message: impl Into<String>) -> Self {
        ModelError::Checkpoint { path: path.to_owned(), message: message.into() }
    }

    pub(crate) fn key(path: &Path, key: &str, given: impl Into<String>, expected: impl Into<String>) -> Self {
        ModelError::Key { path: path.to_owned(), key: key.to_owned(), given: given.into(), expected: expected.into() }
    }

    pub(crate) fn unsupported(path: &Path, what: &str, given: impl Into<String>, supported: impl Into<String>) -> Self {
        ModelError::Unsupported {
            path: path.to_owned(),
            what: what.to_owned(),
            given: given.into(),
            supported: supported.into(),
        }
    }
}

/// The system's words without `(os error 13)`, which tells a user nothing more.
fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_lowercase(),
        None => text,
    }
}

/// `[2048, 64]`.
pub(crate) fn shape_text(shape: &[usize]) -> String {
    let mut text = String::from("[");
    for (i, dim) in shape.iter().enumerate() {
        let _ = write!(text, "{}{dim}", if i == 0 { "" } else { ", " });
    }
    text.push(']');
    text
}
