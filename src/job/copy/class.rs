//! Priorities of jobs and the request classes they become (S39).

use crate::error::{Error, Result};
use crate::request::Class;

/// How important a job is against other background work; the numbers are those of the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum Priority {
    /// Should make progress.
    #[default]
    Background = 3,
    /// Can wait.
    Lazy = 4,
    /// As whatever caused the work. A job has no cause of its own and runs like [`Priority::Background`]; reads that a guest waits for take
    /// the guest's class whatever the priority (S39).
    Inherit = 5,
}

impl Priority {
    /// The values of the option `priority`, in the order of [`Priority::from_index`].
    pub const NAMES: &'static [&'static str] = &["background", "lazy", "inherit"];

    /// The value at an index of [`Priority::NAMES`].
    pub const fn from_index(index: usize) -> Self {
        match index {
            1 => Priority::Lazy,
            2 => Priority::Inherit,
            _ => Priority::Background,
        }
    }

    /// From the C ABI; 0 is the default. Guest classes are refused: a job must not compete with the guest.
    pub fn from_number(number: u32) -> Result<Self> {
        match number {
            0 | 3 => Ok(Priority::Background),
            4 => Ok(Priority::Lazy),
            5 => Ok(Priority::Inherit),
            n => Err(Error::invalid(format!("{n} is not a priority of a job"))),
        }
    }

    /// Name as in the option.
    pub const fn name(self) -> &'static str {
        match self {
            Priority::Background => "background",
            Priority::Lazy => "lazy",
            Priority::Inherit => "inherit",
        }
    }

    /// The class that requests of the job carry.
    pub const fn class(self) -> Class {
        match self {
            Priority::Lazy => Class::Lazy,
            Priority::Background | Priority::Inherit => Class::Background,
        }
    }
}
