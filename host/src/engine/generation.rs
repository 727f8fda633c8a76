//! Generations under way.

use super::resident::Resident;
use super::{EngineError, GenerateOptions, Model, Token};
use crate::model::{DecodeStream, ModelError};
use perpetua_shared::control::End;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// How long a run may take, and who told it to stop.
#[derive(Debug)]
pub(super) struct Limit {
    deadline: Option<Instant>,
    is_over: bool,
    by_user: AtomicBool,
}

impl Limit {
    /// Of a generation that begins now. A time that no clock will show is none.
    pub(super) fn new(options: &GenerateOptions) -> Limit {
        let deadline = options.max_time.and_then(|time| Instant::now().checked_add(time));
        Limit { deadline, is_over: false, by_user: AtomicBool::new(false) }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn stop(&self, resident: &Resident) {
        self.by_user.store(true, Ordering::Relaxed);
        resident.stop();
    }

    /// Stops the run if its time is over.
    fn enforce(&mut self, resident: &Resident) {
        if !self.is_over && self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.is_over = true;
            resident.stop();
        }
    }

    /// Why it ended, where the control block says `end`.
    fn end(&self, end: u32) -> Option<End> {
        match End::from_u32(end) {
            Some(End::Stopped) if self.deadline.is_some() && !self.by_user.load(Ordering::Relaxed) => {
                Some(End::Deadline)
            }
            end => end,
        }
    }
}

/// A generation of several sequences under way: iterate over `(sequence, token)`. Each sequence's tokens come in order.
#[derive(Debug)]
pub struct BatchGeneration<'a> {
    pub(super) resident: &'a mut Resident,
    pub(super) each: Vec<Made<'a>>,
    pub(super) limit: Limit,
    pub(super) ended: bool,
}

/// What one sequence has made.
#[derive(Debug)]
pub(super) struct Made<'a> {
    pub(super) text: Option<DecodeStream<'a>>,
    /// Where its next token lies in the token buffer.
    pub(super) next: usize,
    pub(super) taken: usize,
    /// The last one taken, when its text ends inside a character: what follows may complete it, and where nothing follows
    /// it is this one's text that has the rest.
    pub(super) held: Option<Token>,
    pub(super) end: Option<End>,
}

impl Made<'_> {
    /// The next of `produced` tokens.
    fn take(&mut self, resident: &Resident, produced: u32) -> Result<Option<Token>, EngineError> {
        while produced as usize > self.taken {
            if let Some(token) = self.held.take() {
                return Ok(Some(token));
            }
            let id = resident.token(self.next);
            (self.next, self.taken) = (self.next + 1, self.taken + 1);
            let (text, is_whole) = match &mut self.text {
                Some(stream) => (stream.push(id)?, stream.is_whole()),
                None => (String::new(), true),
            };
            let token = Token { id, text };
            if is_whole {
                return Ok(Some(token));
            }
            self.held = Some(token);
        }
        Ok(None)
    }

    /// The token that waited for another, which does not come.
    fn take_last(&mut self) -> Result<Option<Token>, EngineError> {
        let Some(mut token) = self.held.take() else { return Ok(None) };
        if let Some(stream) = self.text.take() {
            token.text.push_str(&stream.finish()?);
        }
        Ok(Some(token))
    }
}

impl BatchGeneration<'_> {
    /// Asks the run to end after the tokens under way; those already made can still be taken.
    pub fn stop(&self) {
        self.limit.stop(self.resident);
    }

    /// Why sequence `sequence` ended, once all have.
    pub fn end(&self, sequence: usize) -> Option<End> {
        self.each.get(sequence)?.end
    }

    /// A token that has been made, of the sequence of which the fewest have been taken.
    fn take(&mut self) -> Result<Option<(usize, Token)>, EngineError> {
        let resident = &self.resident;
        loop {
            let waiting = self.each.iter_mut().enumerate();
            let waiting = waiting.filter(|(number, made)| resident.produced_of(*number) as usize > made.taken);
            let Some((number, made)) = waiting.min_by_key(|(_, made)| made.taken) else { break };
            if let Some(token) = made.take(resident, resident.produced_of(number))? {
                return Ok(Some((number, token)));
            }
        }
        for (number, made) in self.each.iter_mut().enumerate().filter(|_| self.ended) {
            if let Some(token) = made.take_last()? {
                return Ok(Some((number, token)));
            }
        }
        Ok(None)
    }
}

impl Iterator for BatchGeneration<'_> {
    type Item = Result<(usize, Token), EngineError>;

    fn next(&mut self) -> Option<Result<(usize, Token), EngineError>> {
        loop {
            if !self.ended {
                self.limit.enforce(self.resident);
            }
            let is_over = self.ended || !self.resident.is_running();
            if let Some(token) = self.take().transpose() {
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
                            made.end = self.limit.end(sequence.end);
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

/// A generation under way: iterate over its tokens. Their texts are together the whole text.
#[derive(Debug)]
pub struct Generation<'a> {
    pub(super) resident: &'a mut Resident,
    pub(super) made: Made<'a>,
    pub(super) limit: Limit,
    pub(super) prompt_len: usize,
    pub(super) ended: bool,
}

impl Generation<'_> {
    /// Asks the run to end after the token under way; tokens already made can still be taken.
    pub fn stop(&self) {
        self.limit.stop(self.resident);
    }

    /// How many of the prompt's tokens have been read.
    pub fn prompt_done(&self) -> usize {
        (self.resident.position() as usize).min(self.prompt_len)
    }

    /// Why it ended, once it has.
    ///
    /// ```no_run
    /// # use perpetua::{End, Engine, EngineConfig, GenerateOptions, Model};
    /// # let model = Model::load("path/to/Qwen3-0.6B")?;
    /// # let mut engine = Engine::new(&model, &EngineConfig::default())?;
    /// let mut generation = engine.generate(&model.encode("A cat is")?, &GenerateOptions::default())?;
    /// let text = generation.by_ref().map(|token| token.map(|token| token.text)).collect::<Result<String, _>>()?;
    /// if generation.end() == Some(End::ContextFull) {
    ///     eprintln!("there was no room for more than {text:?}");
    /// }
    /// # Ok::<(), perpetua::EngineError>(())
    /// ```
    pub fn end(&self) -> Option<End> {
        self.made.end
    }

    /// The next token if there is one within `patience`; `Ok(None)` says neither that there is one nor that it has ended
    /// (see [`Generation::end`] and [`Generation::is_ended`]).
    ///
    /// # Errors
    /// The run's first fault.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<Token>, EngineError> {
        let began = Instant::now();
        loop {
            if !self.ended {
                self.limit.enforce(self.resident);
            }
            let is_over = self.ended || !self.resident.is_running();
            if let Some(token) = self.made.take(self.resident, self.resident.produced())? {
                return Ok(Some(token));
            }
            if self.ended {
                return self.made.take_last();
            }
            if is_over {
                self.ended = true;
                let control = self.resident.finish()?;
                self.made.end = self.limit.end(control.end);
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
        self.ended && self.made.held.is_none() && self.resident.produced() as usize <= self.made.taken
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
