//! How a run is told to stop, from any thread.
//!
//! A stopper is one run's. Whoever runs the passes on this machine looks at it between them, so that nobody else writes
//! what workers read. A GPU cannot look: its executor says how the word is brought there, for as long as the run lasts.

use perpetua_shared::control::End;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Ends one run before it ends by itself, from whatever thread: see
/// [`Generation::stopper`](crate::engine::Generation::stopper). Clones are of the same run. Once that has ended they do
/// nothing, and keep nothing of the engine.
///
/// ```no_run
/// # use perpetua::{End, Engine, EngineConfig, GenerateOptions, Model};
/// # let model = Model::load("path/to/Qwen3-0.6B")?;
/// # let mut engine = Engine::new(&model, &EngineConfig::default())?;
/// let mut generation = engine.generate(&model.encode("A cat is")?, &GenerateOptions::default())?;
/// let stopper = generation.stopper();
/// std::thread::spawn(move || {
///     let _ = std::io::stdin().read_line(&mut String::new());
///     stopper.stop();
/// });
/// for token in generation.by_ref() {
///     print!("{}", token?.text);
/// }
/// if generation.end() == Some(End::Stopped) {
///     println!(" (as you wish)");
/// }
/// # Ok::<(), perpetua::EngineError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Stopper {
    run: Arc<Run>,
}

#[derive(Default)]
struct Run {
    /// Why it is to end, an [`End`]; [`End::Running`] until somebody says so.
    why: AtomicU32,
    /// Brings the word to workers that do not look.
    bring: Mutex<Option<Box<dyn Fn() + Send>>>,
}

const _: () = assert!(End::Running as u32 == 0, "what `Run::default` has");

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = End::from_u32(self.why.load(Ordering::Relaxed));
        f.debug_struct("Run").field("why", &why).finish_non_exhaustive()
    }
}

impl Run {
    fn bring(&self) -> MutexGuard<'_, Option<Box<dyn Fn() + Send>>> {
        // A panic while it was held cannot leave it half-written.
        self.bring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stopper {
    /// Asks the run to end after the pass under way, with [`End::Stopped`], unless its time was over before. Tokens
    /// already made can still be taken. It may wait for a lock: for a thread that waits for signals, not for their
    /// handlers.
    pub fn stop(&self) {
        self.tell(End::Stopped);
    }

    /// Asks the run to end because of `why`, unless it has been asked before: who comes first decides.
    pub(crate) fn tell(&self, why: End) {
        debug_assert!(matches!(why, End::Stopped | End::Deadline), "{why:?} is for workers to say");
        // Relaxed: it stands for nothing but itself.
        let told = self.run.why.compare_exchange(End::Running as u32, why as u32, Ordering::Relaxed, Ordering::Relaxed);
        if told.is_ok()
            && let Some(bring) = &*self.run.bring()
        {
            bring();
        }
    }

    /// Whether the run is to end.
    pub(crate) fn is_told(&self) -> bool {
        self.why().is_some()
    }

    /// Why the run ended, where its control block says `end`: workers know that they were stopped, not why.
    pub(crate) fn end(&self, end: u32) -> Option<End> {
        match End::from_u32(end) {
            Some(End::Stopped) => self.why(),
            end => end,
        }
    }

    /// Why the run is to end, if it is.
    pub(crate) fn why(&self) -> Option<End> {
        End::from_u32(self.run.why.load(Ordering::Relaxed)).filter(|why| *why != End::Running)
    }

    /// From now on `bring` is called when the run is to end; at once if it is already.
    pub(crate) fn open(&self, bring: impl Fn() + Send + 'static) {
        let mut slot = self.run.bring();
        // Told before the lock was taken: perhaps by somebody who found nothing to call. Later: they wait for the lock.
        if self.is_told() {
            bring();
        }
        *slot = Some(Box::new(bring));
    }

    /// The run has ended: what [`Stopper::open`] was given is never called again when this returns, nor kept.
    pub(crate) fn close(&self) {
        *self.run.bring() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often it has been called.
    fn counted() -> (Arc<AtomicU32>, impl Fn() + Send + 'static) {
        let count = Arc::new(AtomicU32::new(0));
        let counts = count.clone();
        (count, move || _ = counts.fetch_add(1, Ordering::Relaxed))
    }

    #[test]
    fn who_comes_first_says_why() {
        for (first, second) in [(End::Stopped, End::Deadline), (End::Deadline, End::Stopped)] {
            let stopper = Stopper::default();
            assert!(!stopper.is_told());
            stopper.tell(first);
            stopper.clone().tell(second);
            assert!(stopper.is_told());
            assert_eq!(stopper.end(End::Stopped as u32), Some(first));
            // It ended by itself before it saw the word.
            assert_eq!(stopper.end(End::MaxTokens as u32), Some(End::MaxTokens));
        }
    }

    #[test]
    fn the_word_is_brought_while_the_run_lasts() {
        let (early, late, beyond) = (Stopper::default(), Stopper::default(), Stopper::default());
        let (count, bring) = counted();
        early.stop();
        early.open(bring);
        assert_eq!(count.load(Ordering::Relaxed), 1, "told before there was somebody to tell");

        let (count, bring) = counted();
        late.open(bring);
        assert_eq!(count.load(Ordering::Relaxed), 0);
        std::thread::scope(|scope| {
            (0..2).for_each(|_| _ = scope.spawn(|| late.stop()));
        });
        assert_eq!(count.load(Ordering::Relaxed), 1);

        let (count, bring) = counted();
        beyond.open(bring);
        beyond.close();
        beyond.stop();
        assert_eq!((count.load(Ordering::Relaxed), Arc::strong_count(&count)), (0, 1), "nor is it kept");
    }
}
