//! What prompt lookup brings for texts of one's own: in how many passes an answer is made of a prompt, if the model
//! makes this very answer.
//!
//! `cargo run --release --example lookup -- MODEL_DIR PROMPT_FILE ANSWER_FILE [DRAFTS]`. Of the model only the
//! tokenizer is used; what a pass of so many rows costs, `perpetua bench --prompt-lookup DRAFTS` says.

use perpetua::Model;
use perpetua_device::advance::{advance, advance_verified, draft, step_from};
use perpetua_shared::control::{Control, NO_PROGRAM, Request};
use perpetua_shared::image::{ProgramDesc, TOKEN_LOOP, VERIFIES};
use perpetua_shared::limits::MAX_DRAFTS;
use std::cell::RefCell;

const USAGE: &str = "usage: lookup MODEL_DIR PROMPT_FILE ANSWER_FILE [DRAFTS]";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let ([dir, prompt, answer], more) = args.split_first_chunk().ok_or(USAGE)?;
    let max_drafts = more.first().map_or(Ok(5), |n| n.parse::<usize>())?;
    if max_drafts == 0 || max_drafts > MAX_DRAFTS {
        return Err(format!("{max_drafts} drafts: expected 1 to {MAX_DRAFTS}").into());
    }
    let model = Model::load(dir)?;
    let prompt = model.encode(&std::fs::read_to_string(prompt)?)?;
    let answer = model.encode(&std::fs::read_to_string(answer)?)?;
    if prompt.is_empty() || answer.is_empty() {
        return Err("an empty text: expected at least a token of each".into());
    }
    let rows = passes(&prompt, &answer, max_drafts as u32);
    let (tokens, passes) = (answer.len() - 1, rows.len());
    println!("{} tokens of a prompt; {tokens} after the first of an answer in {passes} passes", prompt.len());
    println!("{:.2} tokens a pass", tokens as f64 / passes.max(1) as f64);
    for n in 1..=max_drafts + 1 {
        println!("{n:5} rows: {} passes", rows.iter().filter(|rows| **rows == n).count());
    }
    Ok(())
}

/// The rows of each pass after the one that reads `prompt` and makes the first token of `answer`: the token loop's own
/// turn, with the answer in the model's place.
fn passes(prompt: &[u32], answer: &[u32], max_drafts: u32) -> Vec<usize> {
    let program = |max_rows, kind| ProgramDesc { max_rows, kind, ..bytemuck::Zeroable::zeroed() };
    let programs = [program(1, TOKEN_LOOP), program(max_drafts + 1, VERIFIES)];
    let text = [prompt, answer].concat();
    // As far as it is known, and what is guessed beyond.
    let tokens = RefCell::new(text[..=prompt.len()].to_vec());
    tokens.borrow_mut().resize(text.len() + max_drafts as usize, u32::MAX);
    let mut control = Control {
        n_tokens: prompt.len() as u32 + 1,
        produced: 1,
        requests: [Request::greedy(answer.len() as u32); _],
        max_context: text.len() as u32,
        max_drafts,
        n_drafts: max_drafts,
        ..bytemuck::Zeroable::zeroed()
    };
    control.step = step_from(&control, &programs, prompt.len() as u32, 0);
    let mut passes = Vec::new();
    while control.step.program != NO_PROGRAM {
        let known = |at: u32| tokens.borrow()[at as usize];
        draft(&mut control, &programs, known, |at, token| tokens.borrow_mut()[at as usize] = token);
        let (first, rows) = (control.step.first_pos as usize + 1, control.step.rows as usize);
        passes.push(rows);
        let chosen = &text[first..][..rows];
        let mut tokens = tokens.borrow_mut();
        let mut made = 1;
        if rows == 1 {
            advance(&mut control, &programs, chosen[0]);
        } else {
            let (given, draft) = (|row: u32| chosen[row as usize], |row: u32| tokens[first + row as usize]);
            made = advance_verified(&mut control, &programs, rows as u32, given, draft) as usize;
        }
        tokens[first..][..made].copy_from_slice(&chosen[..made]);
    }
    passes
}
