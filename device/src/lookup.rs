//! Guesses of what a text goes on with, from the text itself (prompt lookup decoding, Saxena 2023): where its last
//! tokens have stood before, what followed then may follow again. Texts that quote, edit or sum up what they were given
//! do so for long stretches.

/// Tokens at the text's end that have to have stood before: a single one is seldom followed by the same again.
pub const MIN_NGRAM: u32 = 2;

/// Tokens at the text's end that are compared: of places where as many agree the latest is taken.
pub const MAX_NGRAM: u32 = 4;

/// How many of the last tokens of a text of `n`, of which `token` gives each, the tokens before `end` are, which is
/// less: [`MAX_NGRAM`] at most.
pub fn alike(n: u32, end: u32, token: impl Fn(u32) -> u32) -> u32 {
    let most = if end < MAX_NGRAM { end } else { MAX_NGRAM };
    let mut alike = 0;
    while alike < most && token(end - 1 - alike) == token(n - 1 - alike) {
        alike += 1;
    }
    alike
}

/// Where in a text of `n` tokens, of which `token` gives each, what followed its last tokens begins: behind the latest
/// of those places where most of them stood, [`MIN_NGRAM`] at least and [`MAX_NGRAM`] at most.
#[cfg(not(target_arch = "nvptx64"))]
pub fn continuation(n: u32, token: impl Fn(u32) -> u32) -> Option<u32> {
    let last = token(n.checked_sub(1)?);
    let (mut found, mut longest) = (None, MIN_NGRAM - 1);
    for end in (1..n).rev().filter(|end| token(end - 1) == last) {
        let alike = alike(n, end, &token);
        if alike > longest {
            (found, longest) = (Some(end), alike);
        }
        if alike == MAX_NGRAM {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn in_text(text: &[u32]) -> Option<u32> {
        continuation(text.len() as u32, |at| text[at as usize])
    }

    #[test]
    fn what_followed_the_last_tokens_is_found() {
        assert_eq!(in_text(&[]), None);
        assert_eq!(in_text(&[1]), None);
        // One alike is too few, two are not.
        assert_eq!(in_text(&[7, 2, 9, 8, 2]), None);
        assert_eq!(in_text(&[7, 2, 9, 7, 2]), Some(2));
        // The latest of equals, and of all the longest.
        assert_eq!(in_text(&[7, 2, 9, 7, 2, 8, 7, 2]), Some(5));
        assert_eq!(in_text(&[5, 7, 2, 9, 7, 2, 8, 5, 7, 2]), Some(3));
        // A text that repeats itself goes on where it stands.
        assert_eq!(in_text(&[3, 3, 3]), Some(2));
    }

    proptest! {
        /// By the definition: of all places the one that most, then the latest.
        #[test]
        fn the_best_place_is_found(text in proptest::collection::vec(0u32..3, 0..40)) {
            let alike = |end: usize| {
                (1..=MAX_NGRAM as usize).take_while(|i| *i <= end && text[end - i] == text[text.len() - i]).count() as u32
            };
            let places = (1..text.len()).map(|end| (alike(end), end as u32)).filter(|(alike, _)| *alike >= MIN_NGRAM);
            prop_assert_eq!(in_text(&text), places.max().map(|(_, end)| end));
        }
    }
}
