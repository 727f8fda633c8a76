//! Generations under way.

use super::resident::Resident;
use super::{EngineError, Model, Token};
use crate::model::{DecodeStream, ModelError};
use perpetua_shared::control::End;
use std::time::{Duration, Instant};

/// What turns a sequence's ids into text; a model without a tokenizer still generates ids.
///
/// # Errors
/// A tokenizer that cannot be used.
pub(super) fn text_stream(model: &Model) -> Result<Option<DecodeStream<'_>>, EngineError> {
    match model.folder.tokenizer() {
        Ok(tokenizer) => Ok(Some(tokenizer.decode_stream())),
        Err(ModelError::Absent { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A generation of several sequences under way: iterate over `(sequence, token)`. Each sequence's tokens come in order.
#[derive(Debug)]
pub struct BatchGeneration<'a> {
    pub(super) resident: &'a mut Resident,
    pub(super) each: Vec<Made<'a>>,
    pub(super) ended: bool,
}

/// What one sequence of a batch has made.
#[derive(Debug)]
pub(super) struct Made<'a> {
    pub(super) text: Option<DecodeStream<'a>>,
    /// Where its next token lies in the token buffer.
    pub(super) next: usize,
    pub(super) taken: usize,
    pub(super) end: Option<End>,
}

impl BatchGeneration<'_> {
    /// Asks the run to end after the tokens under way; those already made can still be taken.
    pub fn stop(&self) {
        self.resident.stop();
    }

    /// Why sequence `sequence` ended, once all have.
    pub fn end(&self, sequence: usize) -> Option<End> {
        self.each.get(sequence)?.end
    }

    /// A token that has been made, of the sequence of which the fewest have been taken.
    fn take(&mut self) -> Option<Result<(usize, Token), EngineError>> {
        let resident = &self.resident;
        let waiting = self.each.iter_mut().enumerate();
        let waiting = waiting.filter(|(number, made)| resident.produced_of(*number) as usize > made.taken);
        let (number, made) = waiting.min_by_key(|(_, made)| made.taken)?;
        let id = resident.token(made.next);
        (made.next, made.taken) = (made.next + 1, made.taken + 1);
        let text = made.text.as_mut().map_or(Ok(String::new()), |stream| stream.push(id));
        Some(text.map(|text| (number, Token { id, text })).map_err(EngineError::from))
    }
}

impl Iterator for BatchGeneration<'_> {
    type Item = Result<(usize, Token), EngineError>;

    fn next(&mut self) -> Option<Result<(usize, Token), EngineError>> {
        loop {
            let is_over = self.ended || !self.resident.is_running();
            if let Some(token) = self.take() {
                return Some(token);
            }
            if self.ended {
                return None;
            }
            if is_over {
                self.ended = true;
                match self.resident.finish() {
                    Ok(control) => {
                        for (made, sequence) in self.each.iter_mut().zip(&control.sequences) {
                            made.end = End::from_u32(sequence.end);
                        }
                    }
                    Err(error) => return Some(Err(error.into())),
                }
                // The reference has run as a whole; its tokens are there only now.
                continue;
            }
            self.resident.rest();
        }
    }
}

impl Drop for BatchGeneration<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.resident.stop();
            // Whatever the run ended with, nobody is there to hear it.
            let _ = self.resident.finish();
        }
    }
}

/// A generation under way: iterate over its tokens.
#[derive(Debug)]
pub struct Generation<'a> {
    pub(super) resident: &'a mut Resident,
    pub(super) text: Option<DecodeStream<'a>>,
    pub(super) prompt_len: usize,
    pub(super) taken: usize,
    pub(super) ended: bool,
    pub(super) end: Option<End>,
}

impl Generation<'_> {
    /// Asks the run to end after the token under way; tokens already made can still be taken.
    pub fn stop(&self) {
        self.resident.stop();
    }

    /// How many of the prompt's tokens have been read.
    pub fn prompt_done(&self) -> usize {
        (self.resident.position() as usize).min(self.prompt_len)
    }

    /// Why it ended, once it has.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// The next token if there is one within `patience`; `Ok(None)` says neither that there is one nor that it has ended
    /// (see [`Generation::end`] and [`Generation::is_ended`]).
    ///
    /// # Errors
    /// The run's first fault.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<Token>, EngineError> {
        let began = Instant::now();
        loop {
            if self.resident.produced() as usize > self.taken {
                let id = self.resident.token(self.prompt_len + self.taken);
                self.taken += 1;
                let text = match &mut self.text {
                    Some(stream) => stream.push(id)?,
                    None => String::new(),
                };
                return Ok(Some(Token { id, text }));
            }
            if self.ended {
                return Ok(None);
            }
            if !self.resident.is_running() && self.resident.produced() as usize == self.taken {
                self.ended = true;
                let control = self.resident.finish()?;
                self.end = End::from_u32(control.end);
                // The reference has run as a whole; its tokens are there only now.
                continue;
            }
            if began.elapsed() >= patience {
                return Ok(None);
            }
            self.resident.rest();
        }
    }

    /// Whether the run is over and every token has been taken.
    pub fn is_ended(&self) -> bool {
        self.ended && self.resident.produced() as usize <= self.taken
    }

    /// Text that was held back because a character might still have been completed; empty as a rule.
    ///
    /// # Errors
    /// From the tokenizer.
    pub fn rest_of_text(&mut self) -> Result<String, EngineError> {
        match self.text.take() {
            Some(stream) => Ok(stream.finish()?),
            None => Ok(String::new()),
        }
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, EngineError>;

    fn next(&mut self) -> Option<Result<Token, EngineError>> {
        loop {
            match self.poll(Duration::from_secs(3600)) {
                Ok(Some(token)) => return Some(Ok(token)),
                Ok(None) if self.is_ended() => return None,
                Ok(None) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.resident.stop();
            // Whatever the run ended with, nobody is there to hear it.
            let _ = self.resident.finish();
        }
    }
}
