//! A program cut into launches: for the executor that runs it operator by operator, as engines without a persistent
//! kernel do.
//!
//! Tasks of an image stand in program order, those of an operator one after the other, and wait only on tasks before
//! them. So a launch may run consecutive tasks of one operator together, as long as none of them waits on another; and
//! launches that follow each other, each begun when the one before has ended, order everything that events order.

use crate::image::Image;
use std::collections::HashSet;
use std::ops::Range;

/// The launches of program `program`: ranges of tasks that cover it, in order.
pub fn operators(image: &Image, program: usize) -> Vec<Range<u32>> {
    let view = image.view();
    let tasks = &view.programs[program];
    let mut launches: Vec<Range<u32>> = Vec::new();
    // What tasks of the last launch trigger.
    let mut triggered: HashSet<u32> = HashSet::new();
    for id in tasks.task_first..tasks.task_first + tasks.task_count {
        let task = &view.tasks[id as usize];
        let is_of_last = launches.last().is_some_and(|last| {
            view.tasks[last.start as usize].op == task.op
                && view.waits(task).iter().all(|event| !triggered.contains(event))
        });
        match launches.last_mut().filter(|_| is_of_last) {
            Some(last) => last.end = id + 1,
            None => {
                launches.push(id..id + 1);
                triggered.clear();
            }
        }
        triggered.extend(view.triggers(task));
    }
    launches
}
