//! The CSV files of the minimalloc benchmarks: a header, then a row per buffer.
//!
//! Columns `id`, `lower`, `upper`, `size` are required and may stand in any order; `alignment` is optional (1). Others
//! are refused, since a constraint not understood must not be dropped silently. Output is the same rows, each with its
//! `offset`.

use std::collections::HashMap;
use std::fmt::Write as _;

use thiserror::Error;

use super::types::{Buffer, Placement};

/// Buffers with the names their file gives them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Parallel to `buffers`, no two equal.
    pub ids: Vec<String>,
    /// In the order of the file.
    pub buffers: Vec<Buffer>,
    /// Whether the file had alignments, so that the output has them too.
    pub has_alignment: bool,
}

/// Why a text is no table. Lines count from 1, the header included.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CsvError {
    /// Nothing in the file.
    #[error("the file is empty, expected a header line `id,lower,upper,size`")]
    Empty,
    /// A column that has to be there is not.
    #[error("no column `{name}`; the header is `{header}`, expected `id,lower,upper,size` and optionally `alignment`")]
    MissingColumn {
        /// Which.
        name: &'static str,
        /// The first line as given.
        header: String,
    },
    /// A column of a meaning unknown here, or one named twice.
    #[error(
        "column `{name}` is not understood or given twice, expected `id,lower,upper,size` and optionally `alignment`"
    )]
    UnknownColumn {
        /// As given.
        name: String,
    },
    /// A row of another length than the header.
    #[error("line {line}: {n_fields} fields, expected {n_columns} as in the header")]
    Fields {
        /// Where.
        line: usize,
        /// In this line.
        n_fields: usize,
        /// In the header.
        n_columns: usize,
    },
    /// Not an unsigned 64-bit number.
    #[error("line {line}: {column} is `{given}`, expected a whole number from 0 to 18446744073709551615")]
    Number {
        /// Where.
        line: usize,
        /// In which column.
        column: &'static str,
        /// As given.
        given: String,
    },
    /// An id of an earlier row.
    #[error("line {line}: id `{id}` is already on line {earlier}, expected each id once")]
    Duplicate {
        /// Where.
        line: usize,
        /// Which.
        id: String,
        /// Where before.
        earlier: usize,
    },
    /// A lifetime without an instant.
    #[error("line {line}: buffer `{id}` lives in [{lower}, {upper}), expected lower < upper")]
    EmptyLifetime {
        /// Where.
        line: usize,
        /// Which.
        id: String,
        /// As given.
        lower: u64,
        /// As given.
        upper: u64,
    },
    /// An alignment of zero.
    #[error("line {line}: buffer `{id}` has alignment 0, expected at least 1")]
    ZeroAlignment {
        /// Where.
        line: usize,
        /// Which.
        id: String,
    },
}

const COLUMNS: [&str; 5] = ["id", "lower", "upper", "size", "alignment"];

impl Table {
    /// Reads a table.
    pub fn parse(text: &str) -> Result<Self, CsvError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines =
            text.lines().enumerate().map(|(i, line)| (i + 1, line.trim())).filter(|(_, line)| !line.is_empty());
        let (_, header) = lines.next().ok_or(CsvError::Empty)?;
        let mut columns = [None; COLUMNS.len()];
        let mut n_columns = 0;
        for (field, name) in header.split(',').map(str::trim).enumerate() {
            let column = COLUMNS.iter().position(|column| *column == name);
            match column.map(|column| &mut columns[column]) {
                Some(place @ None) => *place = Some(field),
                _ => return Err(CsvError::UnknownColumn { name: name.to_owned() }),
            }
            n_columns += 1;
        }
        for (name, column) in COLUMNS.iter().zip(&columns).take(4) {
            if column.is_none() {
                return Err(CsvError::MissingColumn { name, header: header.to_owned() });
            }
        }
        let mut table = Self { ids: Vec::new(), buffers: Vec::new(), has_alignment: columns[4].is_some() };
        let mut lines_by_id: HashMap<String, usize> = HashMap::new();
        for (line, row) in lines {
            let fields: Vec<&str> = row.split(',').map(str::trim).collect();
            if fields.len() != n_columns {
                return Err(CsvError::Fields { line, n_fields: fields.len(), n_columns });
            }
            let number = |column: usize| match columns[column] {
                None => Ok(1),
                Some(field) => fields[field].parse().map_err(|_| CsvError::Number {
                    line,
                    column: COLUMNS[column],
                    given: fields[field].to_owned(),
                }),
            };
            let id = fields[columns[0].expect("required above")].to_owned();
            let (lower, upper, size_bytes, alignment) = (number(1)?, number(2)?, number(3)?, number(4)?);
            if lower >= upper {
                return Err(CsvError::EmptyLifetime { line, id, lower, upper });
            }
            if alignment == 0 {
                return Err(CsvError::ZeroAlignment { line, id });
            }
            if let Some(earlier) = lines_by_id.insert(id.clone(), line) {
                return Err(CsvError::Duplicate { line, id, earlier });
            }
            table.ids.push(id);
            table.buffers.push(Buffer { lower, upper, size_bytes, alignment });
        }
        Ok(table)
    }

    /// The rows with their offsets.
    ///
    /// # Panics
    /// If the placement is not one of this table's buffers.
    pub fn with_offsets(&self, placement: &Placement) -> String {
        assert_eq!(placement.offsets.len(), self.buffers.len(), "a placement has an offset per buffer");
        let mut text = String::from("id,lower,upper,size,");
        text.push_str(if self.has_alignment { "alignment,offset\n" } else { "offset\n" });
        for ((id, buffer), offset) in self.ids.iter().zip(&self.buffers).zip(&placement.offsets) {
            let Buffer { lower, upper, size_bytes, alignment } = buffer;
            let written = if self.has_alignment {
                writeln!(text, "{id},{lower},{upper},{size_bytes},{alignment},{offset}")
            } else {
                writeln!(text, "{id},{lower},{upper},{size_bytes},{offset}")
            };
            written.expect("writing to a String does not fail");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_may_stand_in_any_order() {
        let table = Table::parse("size,id,upper,lower\n4,b1,3,0\n\n5,b2,9,3\r\n").unwrap();
        assert_eq!(table.ids, ["b1", "b2"]);
        assert_eq!(table.buffers, [Buffer::new(0, 3, 4), Buffer::new(3, 9, 5)]);
        let text = table.with_offsets(&Placement { offsets: vec![0, 7], peak_bytes: 12 });
        assert_eq!(text, "id,lower,upper,size,offset\nb1,0,3,4,0\nb2,3,9,5,7\n");
    }

    #[test]
    fn alignment_is_kept() {
        let table = Table::parse("id,lower,upper,size,alignment\na,0,1,4,64\n").unwrap();
        assert_eq!(table.buffers[0].alignment, 64);
        let text = table.with_offsets(&Placement { offsets: vec![64], peak_bytes: 68 });
        assert_eq!(text, "id,lower,upper,size,alignment,offset\na,0,1,4,64,64\n");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let message = |text: &str| Table::parse(text).unwrap_err().to_string();
        assert!(message("").contains("empty"));
        assert!(message("\n \n").contains("empty"));
        assert!(message("id,lower,size\n").contains("no column `upper`"));
        assert!(message("id,lower,upper,size,hint\n").contains("`hint`"));
        assert!(message("id,id,upper,size,lower\n").contains("`id`"));
        assert!(message("id,lower,upper,size\na,0,1\n").contains("line 2: 3 fields, expected 4"));
        assert!(message("id,lower,upper,size\na,-1,1,4\n").contains("line 2: lower is `-1`"));
        assert!(
            message("id,lower,upper,size\na,0,1,99999999999999999999\n").contains("size is `99999999999999999999`")
        );
        assert!(message("id,lower,upper,size\na,0,1,1.5\n").contains("`1.5`"));
        assert!(message("id,lower,upper,size\na,3,3,4\n").contains("[3, 3)"));
        assert!(message("id,lower,upper,size\na,0,1,4\na,0,1,4\n").contains("already on line 2"));
        assert!(message("id,lower,upper,size,alignment\na,0,1,4,0\n").contains("alignment 0"));
    }
}
