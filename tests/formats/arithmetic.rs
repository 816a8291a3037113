//! Integer arithmetic from text: what the formulas of the document are written in.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

/// Values of a formula's names.
pub type Names = BTreeMap<String, i64>;

/// What a text comes to, with these values of names.
///
/// # Panics
/// If it is no arithmetic.
pub fn value(text: &str, names: &Names) -> i64 {
    Parser { rest: text.chars().peekable(), names }.whole()
}

/// A reader of integer arithmetic.
struct Parser<'t> {
    rest: Peekable<Chars<'t>>,
    names: &'t Names,
}

impl Parser<'_> {
    fn whole(mut self) -> i64 {
        let value = self.sum();
        assert_eq!(self.peek(), None, "nothing follows");
        value
    }

    fn peek(&mut self) -> Option<char> {
        while self.rest.next_if(|next| next.is_whitespace()).is_some() {}
        self.rest.peek().copied()
    }

    fn take(&mut self, wanted: char) -> bool {
        let is_it = self.peek() == Some(wanted);
        if is_it {
            self.rest.next();
        }
        is_it
    }

    fn sum(&mut self) -> i64 {
        let mut value = self.product();
        loop {
            if self.take('+') {
                value += self.product();
            } else if self.take('-') {
                value -= self.product();
            } else {
                return value;
            }
        }
    }

    fn product(&mut self) -> i64 {
        let mut value = self.factor();
        loop {
            if self.take('*') {
                value *= self.factor();
            } else if self.take('/') {
                value /= self.factor();
            } else if self.take('%') {
                value %= self.factor();
            } else {
                return value;
            }
        }
    }

    fn list(&mut self, end: char) -> Vec<i64> {
        let mut values = vec![self.sum()];
        while self.take(',') {
            values.push(self.sum());
        }
        assert!(self.take(end), "`{end}` is missing");
        values
    }

    fn factor(&mut self) -> i64 {
        if self.take('(') {
            return self.list(')')[0];
        }
        if self.take('[') {
            let values = self.list(']');
            assert!(self.take('['), "a list is for picking");
            return values[self.list(']')[0] as usize];
        }
        self.peek();
        let mut word = String::new();
        while let Some(next) = self.rest.next_if(|next| next.is_alphanumeric() || *next == '_') {
            word.push(next);
        }
        match word.parse() {
            Ok(number) => number,
            Err(_) if word == "ceil" => {
                assert!(self.take('('));
                let [a, b] = self.list(')')[..] else { panic!("ceil has two arguments") };
                (a + b - 1) / b
            }
            Err(_) => *self.names.get(&word).unwrap_or_else(|| panic!("what is `{word}`?")),
        }
    }
}

/// The evaluator computes, and does not guess.
#[test]
fn arithmetic_is_that_of_integers() {
    let names = Names::from([("n".to_owned(), 13), ("K".to_owned(), 300)]);
    let value = |text: &str| value(text, &names);
    assert_eq!(value("2 + 3 * n % 8 / 2 - 1"), 2 + 3 * 13 % 8 / 2 - 1);
    assert_eq!(value("ceil(K, 128) * (n - 3)"), 30);
    assert_eq!(value("[7, 8, 9][n % 3 + 1] / 2"), 4);
}
