//! Sentence embedding models.

use super::resident::{Place, Resident, one_pass};
use super::{EngineConfig, EngineError, Model, sentence_sources};
use crate::exec::RunError;
use crate::model;
use perpetua_shared::ProgramId;
use perpetua_shared::limits::MAX_PROGRAMS;

/// A sentence embedding model, resident.
#[derive(Debug)]
pub struct Embedder {
    model: Model,
    resident: Resident,
}

/// Rows of the passes compiled for sentences of at most `max` tokens, ascending: eight lengths, then four to each doubling, so
/// that what is computed for nothing is a fifth at most of all but the shortest; beyond 1024 one to each, so that an image has
/// room for all.
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

impl Embedder {
    /// Compiles `model` and starts its workers.
    ///
    /// # Errors
    /// From the model folder, the compiler, the memory or the system.
    pub fn new(model: &Model, config: &EngineConfig) -> Result<Embedder, EngineError> {
        let place = Place::of(config)?;
        let max = model.max_tokens();
        let sources = sentence_sources(model, &sentence_rows(max))?;
        let resident = Resident::at(sources, model, place, &config.just_in_time, |_| {})?;
        Ok(Embedder { model: model.clone(), resident })
    }

    /// The embedding of `text`, cut to the model's longest input.
    ///
    /// # Errors
    /// From the tokenizer or the run.
    pub fn embed(&mut self, text: &str) -> Result<Vec<f32>, EngineError> {
        let ids = self.model.encode_sentence(text)?;
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
        let programs = self.resident.compiled.image.view().programs;
        let Some(program) = programs.iter().position(|p| p.max_rows as usize >= ids.len()) else {
            let max = self.model.max_tokens();
            return Err(EngineError::PromptTooLong { tokens: ids.len(), context: max, model: max });
        };
        let program = ProgramId(program as u32);
        self.resident.set_tokens(0, ids);
        self.resident.start(one_pass(program, 0, ids.len() as u32, ids.len() as u32));
        self.resident.finish()?;
        let output = self.resident.output(program, "embedding").ok_or(EngineError::Purpose("embeddings"))?;
        let embedding = self.resident.read_f32(&output, 1)?;
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
