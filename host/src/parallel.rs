//! Work that is shared among cores.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, Scope};

/// Of workers' lists: a GPU's SMs are shared among four threads; a CPU's lists are short.
pub(crate) const LISTS: usize = 32;

/// Runs `work` on a thread of its own, or here, where the system gives none.
pub(crate) fn spawned<'scope>(scope: &'scope Scope<'scope, '_>, work: impl FnOnce() + Send + 'scope) {
    // A builder that finds no thread drops what it was given.
    let work = Arc::new(Mutex::new(Some(work)));
    let taken = work.clone();
    let run = move || {
        let work = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = work {
            work();
        }
    };
    if Builder::new().spawn_scoped(scope, run).is_err()
        && let Some(work) = work.lock().unwrap_or_else(PoisonError::into_inner).take()
    {
        work();
    }
}

/// What `f` and `g` come to, one on a thread of its own.
pub(crate) fn both<T: Send, U>(f: impl FnOnce() -> T + Send, g: impl FnOnce() -> U) -> (T, U) {
    let made = Mutex::new(None);
    let g = std::thread::scope(|scope| {
        spawned(scope, || *made.lock().unwrap_or_else(PoisonError::into_inner) = Some(f()));
        g()
    });
    let Some(f) = made.into_inner().unwrap_or_else(PoisonError::into_inner) else {
        unreachable!("a thread's panic has ended the scope")
    };
    (f, g)
}

/// `f` of every item and its number, on as many threads as there are cores, as long as each has `least` items, which
/// should take longer than it takes to start a thread; the results in the items' order.
pub(crate) fn side_by_side<T: Send, U: Send>(items: Vec<T>, least: usize, f: impl Fn(usize, T) -> U + Sync) -> Vec<U> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len() / least);
    if n_threads <= 1 {
        return items.into_iter().enumerate().map(|(number, item)| f(number, item)).collect();
    }
    let queue = Mutex::new(items.into_iter().enumerate());
    let work = || {
        let mut done = Vec::new();
        loop {
            // A statement of its own: the lock is not held while `f` runs.
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((number, item)) = next else { return done };
            done.push((number, f(number, item)));
        }
    };
    let mut done = std::thread::scope(|scope| {
        // What a thread that there is not would have done, others do.
        let others: Vec<_> = (1..n_threads).map_while(|_| Builder::new().spawn_scoped(scope, work).ok()).collect();
        let mut done = work();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}
