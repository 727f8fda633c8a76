//! Work that is shared among cores.

use std::sync::{Mutex, PoisonError};

/// Of workers' lists: a GPU's SMs are shared among four threads; a CPU's lists are short.
pub(crate) const LISTS: usize = 32;

/// What `f` and `g` come to, one on a thread of its own.
pub(crate) fn both<T: Send, U>(f: impl FnOnce() -> T + Send, g: impl FnOnce() -> U) -> (T, U) {
    std::thread::scope(|scope| {
        let f = scope.spawn(f);
        let g = g();
        (f.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), g)
    })
}

/// `f` of every item and its number, on as many threads as there are cores, as long as each has `least` items, which should take longer than
/// it takes to start a thread; the results in the items' order.
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
        let others: Vec<_> = (1..n_threads).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}
