//! Space that is reserved before data is read.
//!
//! A filter that parks data (the RAM cache) hands out memory of its own, counted against its limits, before the read
//! that fills it starts (S41). The reader fills the buffers and writes them to the node; the node recognises its own
//! memory by the segments' owner and keeps it without a copy. What is not used goes back when the buffers are dropped.

use crate::request::Buffers;
use std::any::Any;

/// Memory for a coming write, and whatever else must be given back if the write does not come.
#[derive(Debug)]
pub struct Reservation {
    len: u64,
    permit: Option<Box<dyn Permit>>,
}

/// What a reservation holds beside its memory (space in a cache, a place in a queue); given back by dropping it.
pub trait Permit: Send + Sync + std::fmt::Debug + Any {
    /// Memory for the next `len` bytes of the reservation.
    fn buffers(&mut self, len: u64) -> Buffers;
    /// Gives back `len` bytes that will not be used.
    fn surplus(&mut self, len: u64);
    /// Whether the write that follows will be passed through to the node below before it is acknowledged.
    fn writes_through(&self) -> bool;
}

impl Reservation {
    /// A reservation of plain memory, limited by nothing but its own length.
    pub fn unbounded(len: u64) -> Self {
        Self { len, permit: None }
    }

    /// A reservation that draws its memory from `permit`.
    pub fn with_permit(len: u64, permit: Box<dyn Permit>) -> Self {
        Self { len, permit: Some(permit) }
    }

    /// Bytes still reserved.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes buffers for `len` bytes out of the reservation. Panics if that much is not reserved.
    pub fn take(&mut self, len: u64) -> Buffers {
        assert!(len <= self.len, "more taken than reserved");
        self.len -= len;
        match &mut self.permit {
            Some(permit) => permit.buffers(len),
            None => Buffers::alloc(len as usize, 4096),
        }
    }

    /// Gives `len` bytes back (others had preserved them meanwhile, S43).
    pub fn give_back(&mut self, len: u64) {
        let len = len.min(self.len);
        self.len -= len;
        if let Some(permit) = &mut self.permit {
            permit.surplus(len);
        }
    }

    /// Whether writes with this reservation reach the node below before they are acknowledged.
    pub fn writes_through(&self) -> bool {
        self.permit.as_ref().is_some_and(|p| p.writes_through())
    }
}
