//! Sentence embedding models: those that see a sentence at once, as encoders do, and decoders that read it as they read
//! a prompt.

use super::resident::Resident;
use super::{EngineConfig, EngineError, Model, Plan, sentence_sources};
use crate::exec::RunError;
use crate::graph::kernel::PromptPrecision;
use crate::model;
use crate::model::decoder::Cache;
use perpetua_shared::DType;
use perpetua_shared::limits::MAX_PROGRAMS;

/// A sentence embedding model, resident.
#[derive(Debug)]
pub struct Embedder {
    model: Model,
    resident: Resident,
    /// Tokens of the longest sentence.
    context: usize,
}

/// Rows of passes for whole sentences of at most `max` tokens, ascending: eight lengths, then four to each doubling, so
/// that what is computed for nothing is a fifth at most of all but the shortest; beyond 1024 one to each, so that an
/// image has room for all.
fn sentence_rows(max: usize) -> Vec<usize> {
    let lengths = std::iter::successors(Some(16usize), |rows| {
        let step = match rows {
            ..128 => 16,
            128..1024 => (1 << rows.ilog2()) / 4,
            _ => *rows,
        };
        Some(rows + step)
    });
    let mut rows: Vec<usize> = lengths.take_while(|rows| *rows < max).take(MAX_PROGRAMS - 1).collect();
    rows.push(max);
    rows
}

/// Element type of keys and values that no later pass reads, which are the size of a sentence: for GPUs as tensor cores
/// want them, else as they are made.
pub fn passing_dtype(for_gpu: bool) -> DType {
    if for_gpu { DType::Bf16 } else { DType::F32 }
}

impl Embedder {
    /// Compiles `model` and starts its workers. [`EngineConfig::max_context`] and [`EngineConfig::prompt_precision`]
    /// are for decoders: an encoder, which has no KV cache, takes the longest input it was made for, and sees it at
    /// once.
    ///
    /// # Errors
    /// From the model folder, the compiler, the memory or the system.
    pub fn new(model: &Model, config: &EngineConfig) -> Result<Embedder, EngineError> {
        model.sentence_model()?;
        let is_encoder = model.config().architecture().is_encoder();
        let config = match is_encoder {
            true => EngineConfig {
                max_context: Some(model.max_tokens()),
                prompt_precision: PromptPrecision::default(),
                ..config.clone()
            },
            false => config.clone(),
        };
        let Plan { place, context, cache_dtype, chunks } = Plan::of(model, &config)?;
        let takes_whole = model.takes_whole();
        let dtype = if takes_whole { passing_dtype(place.is_gpu()) } else { cache_dtype };
        let cache = Cache { sequences: 1, context, dtype };
        let rows = if takes_whole { &sentence_rows(context)[..] } else { chunks };
        let mut sources = sentence_sources(model, rows, cache)?;
        sources.iter_mut().for_each(|source| source.graph.prompt_precision = config.prompt_precision);
        model.unpack(|_| {})?;
        let resident = Resident::at(sources, model, place, &config.just_in_time, |_| {})?;
        Ok(Embedder { model: model.clone(), resident, context })
    }

    /// The embedding of `text`, after the model's default prompt if it has one, cut to the model's longest input, or to
    /// [`EngineConfig::max_context`]; [`encode_sentence_within`](model::ModelFolder::encode_sentence_within) says
    /// whether it is.
    ///
    /// # Errors
    /// From the tokenizer or the run.
    pub fn embed(&mut self, text: &str) -> Result<Vec<f32>, EngineError> {
        self.embed_as(None, text)
    }

    /// As [`Embedder::embed`], after the `prompt` of this name: models that tell queries from documents have one for
    /// each, see [`SentenceConfig::prompts`](model::SentenceConfig::prompts).
    ///
    /// # Errors
    /// As [`Embedder::embed`]; a prompt that the model does not have.
    pub fn embed_as(&mut self, prompt: Option<&str>, text: &str) -> Result<Vec<f32>, EngineError> {
        let (ids, _) = self.model.encode_sentence_within(prompt, text, self.context)?;
        self.embed_ids(&ids)
    }

    /// The embedding of the sentence with token ids `ids`.
    ///
    /// # Errors
    /// No ids, too many, or ids the model does not have.
    pub fn embed_ids(&mut self, ids: &[u32]) -> Result<Vec<f32>, EngineError> {
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        model::check_token_ids(ids, self.model.config().vocab_size())?;
        if ids.len() > self.context {
            let model = self.model.max_tokens();
            return Err(EngineError::PromptTooLong { tokens: ids.len(), context: self.context, model });
        }
        let mut embedding = Vec::new();
        self.resident.read(ids, |resident, program, positions| {
            if positions.end == ids.len() {
                let output = resident.output(program, "embedding").ok_or(EngineError::Purpose("embeddings"))?;
                embedding = resident.read_f32(&output, 1)?;
            }
            Ok(())
        })?;
        if embedding.iter().any(|x| x.is_nan()) {
            return Err(RunError::EmbeddingNotANumber.into());
        }
        Ok(embedding)
    }

    /// See [`Embedder::resident`].
    pub fn resident_mut(&mut self) -> &mut Resident {
        &mut self.resident
    }

    /// The image and its executor.
    pub fn resident(&self) -> &Resident {
        &self.resident
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PROGRAMS, sentence_rows};

    #[test]
    fn sentences_compute_little_for_nothing() {
        assert_eq!(sentence_rows(100), [16, 32, 48, 64, 80, 96, 100]);
        let rows = sentence_rows(512);
        assert_eq!(rows, [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]);
        assert_eq!(sentence_rows(8), [8]);
        assert_eq!(sentence_rows(5000)[18..], [896, 1024, 2048, 4096, 5000]);
        assert!(sentence_rows(1 << 24).len() <= MAX_PROGRAMS);
    }
}
