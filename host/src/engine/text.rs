//! What a sequence's tokens say, and where that ends: before the first of its stop strings.
//!
//! Workers know tokens, not texts, so a stop string is found by whoever takes the tokens, and the run told to end.
//! Laws:
//! - Of occurrences the first is the one that is complete first; of those complete at once, the longest. So where the
//!   text ends does not depend on how it falls into tokens.
//! - What may still become a stop string is withheld until it cannot, or until nothing follows.

use super::{EngineError, Model};
use crate::model::{DecodeStream, ModelError};

/// What turns a sequence's ids into text.
#[derive(Debug)]
pub(super) struct Text<'a> {
    stream: DecodeStream<'a>,
    stops: Stops,
}

impl<'a> Text<'a> {
    /// Of a sequence of `model` that ends before any of `stop_strings`. A model without a tokenizer still generates
    /// ids: `None`.
    ///
    /// # Errors
    /// A tokenizer that cannot be used; or none, where there are stop strings to find.
    pub(super) fn of(model: &'a Model, stop_strings: &[String]) -> Result<Option<Text<'a>>, EngineError> {
        match model.folder.tokenizer() {
            Ok(tokenizer) => Ok(Some(Text { stream: tokenizer.decode_stream(), stops: Stops::new(stop_strings) })),
            Err(ModelError::Absent { .. }) if stop_strings.is_empty() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the next token and gives the text that it makes certain.
    pub(super) fn push(&mut self, id: u32) -> Result<String, EngineError> {
        let new = self.stream.push(id)?;
        Ok(self.stops.push(new))
    }

    /// Whether nothing of the tokens so far is withheld.
    pub(super) fn is_whole(&self) -> bool {
        self.is_stopped() || self.stream.is_whole() && self.stops.withheld.is_empty()
    }

    /// Whether it has ended with a stop string.
    pub(super) fn is_stopped(&self) -> bool {
        self.stops.is_found
    }

    /// What was withheld, since nothing follows.
    pub(super) fn finish(mut self) -> Result<String, EngineError> {
        let mut rest = self.stops.push(self.stream.finish()?);
        rest.push_str(&self.stops.withheld);
        Ok(rest)
    }
}

/// Finds stop strings in a text that comes in pieces.
#[derive(Debug, Default)]
struct Stops {
    strings: Vec<String>,
    /// The end of the text so far, which may be the beginning of one.
    withheld: String,
    is_found: bool,
}

impl Stops {
    fn new(strings: &[String]) -> Stops {
        Stops { strings: strings.to_vec(), ..Stops::default() }
    }

    /// What is certain of the text with the next piece of it.
    fn push(&mut self, piece: String) -> String {
        if self.is_found || self.strings.is_empty() {
            return if self.is_found { String::new() } else { piece };
        }
        let mut text = std::mem::take(&mut self.withheld) + &piece;
        let found = self.strings.iter().filter_map(|stop| text.find(stop.as_str()).map(|at| (at + stop.len(), at)));
        if let Some((_, at)) = found.min() {
            self.is_found = true;
            text.truncate(at);
            return text;
        }
        let withheld = self.strings.iter().map(|stop| beginning_at_end(&text, stop)).max().unwrap_or(0);
        self.withheld = text.split_off(text.len() - withheld);
        text
    }
}

/// Bytes of the longest end of `text` that `stop` begins with, and goes on after.
fn beginning_at_end(text: &str, stop: &str) -> usize {
    let mut cuts = stop.char_indices().rev().map(|(at, _)| at);
    cuts.find(|at| text.ends_with(&stop[..*at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::Stops;
    use proptest::prelude::*;

    /// What comes out of a text given in `pieces`, and whether a stop string was found.
    fn of(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut stops = Stops::new(&stops.iter().map(|stop| (*stop).to_owned()).collect::<Vec<_>>());
        let mut text: String = pieces.iter().map(|piece| stops.push((*piece).to_owned())).collect();
        text.push_str(&stops.withheld);
        (text, stops.is_found)
    }

    #[test]
    fn a_text_ends_before_the_first_stop_string() {
        for (stops, pieces, expected) in [
            (&["END"][..], &["one E", "ND two"][..], "one "),
            (&["END"], &["E", "NE", "N", "D"], "EN"),
            (&["aab"], &["aa", "ab"], "a"),
            (&["\n\n", "User:"], &["a\n", "b Use", "r: c\n\n"], "a\nb "),
            // Complete first, though it begins later; complete at once, the longest.
            (&["abcd", "c"], &["xabcd"], "xab"),
            (&["c", "abc"], &["xabc"], "x"),
            (&["\u{fc}!"], &["gr\u{fc}", "n \u{fc}", "!"], "gr\u{fc}n "),
            (&["x"], &["x"], ""),
        ] {
            assert_eq!(of(stops, pieces), (expected.to_owned(), true), "{stops:?} {pieces:?}");
        }
        assert_eq!(of(&["END"], &["one E", "N"]), ("one EN".to_owned(), false), "nothing follows");
        assert_eq!(of(&[], &["a", ""]), ("a".to_owned(), false));
    }

    #[test]
    fn what_may_become_one_is_withheld_and_no_more() {
        let mut stops = Stops::new(&["END".to_owned(), "EEK".to_owned()]);
        for (piece, given) in [("a", "a"), ("E", ""), ("E", ""), ("N", "E"), ("x", "ENx"), ("E", "")] {
            assert_eq!(stops.push(piece.to_owned()), given, "{piece}");
        }
    }

    proptest! {
        /// Where it ends does not depend on how it falls into pieces.
        #[test]
        fn pieces_make_no_difference(text in "[ab\u{fc}]{0,24}", cuts in prop::collection::vec(0usize..24, 0..8), stops in prop::collection::vec("[ab\u{fc}]{1,5}", 0..4)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|at| text.is_char_boundary(*at)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
            prop_assert_eq!(of(&stops, &pieces), of(&stops, &[&text]));
        }
    }
}
