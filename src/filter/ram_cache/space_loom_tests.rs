//! The line for space under every interleaving (S42, S74): nobody in line is forgotten, whoever leaves hands on what he had, and all bytes
//! come back. Run with `RUSTFLAGS="--cfg cobweb_loom" LOOM_MAX_PREEMPTIONS=2 cargo test --release --lib loom`.

use super::space::Space;
use crate::error::IoError;
use crate::request::budget::Budget;
use crate::sync::{Arc, thread};
use loom::future::block_on;

fn full(limit: u64) -> Arc<Space> {
    let space = Space::new(limit, 0);
    assert!(space.try_take(limit));
    space
}

fn giving(space: &Arc<Space>, len: u64) -> thread::JoinHandle<()> {
    let space = space.clone();
    thread::spawn(move || space.give(len))
}

#[test]
fn whoever_gets_in_line_while_space_is_returned_gets_it() {
    loom::model(|| {
        let space = full(1);
        let giver = giving(&space, 1);
        assert_eq!(block_on(space.enter(1)), Ok(()));
        giver.join().unwrap();
        assert_eq!((space.used(), space.waiters()), (1, 0));
    });
}

#[test]
fn one_that_leaves_the_line_hands_on_what_was_booked_for_it() {
    loom::model(|| {
        let space = full(1);
        let giver = giving(&space, 1);
        let leaver = {
            let space = space.clone();
            // A cancel: it may have been served already, or be first in line, or not.
            thread::spawn(move || drop(space.enter(1)))
        };
        assert_eq!(block_on(space.enter(1)), Ok(()));
        giver.join().unwrap();
        leaver.join().unwrap();
        space.give(1);
        assert_eq!((space.used(), space.waiters()), (0, 0));
    });
}

#[test]
fn a_small_request_never_passes_a_large_one() {
    loom::model(|| {
        let space = full(2);
        let large = space.enter(2);
        let small = space.enter(1);
        let givers = [giving(&space, 1), giving(&space, 1)];
        assert!(!small.is_ready(), "not before the one in front of it");
        assert_eq!(block_on(large), Ok(()));
        for giver in givers {
            giver.join().unwrap();
        }
        assert!(!small.is_ready());
        space.give(2);
        assert_eq!(block_on(small), Ok(()));
    });
}

#[test]
fn breaking_ends_the_wait_of_those_in_line_and_of_those_who_come() {
    loom::model(|| {
        let space = full(1);
        let breaker = {
            let space = space.clone();
            thread::spawn(move || space.break_with(IoError::cancelled()))
        };
        assert_eq!(block_on(space.enter(1)), Err(IoError::cancelled()));
        breaker.join().unwrap();
        space.give(1);
        assert_eq!(space.used(), 0);
    });
}

#[test]
fn a_space_that_waits_for_the_budget_gets_what_another_one_returns() {
    loom::model(|| {
        let budget = Budget::new(1);
        let (a, b) = (Space::new(1, 0), Space::new(1, 0));
        for space in [&a, &b] {
            space.join(&budget, 0, 0, || ()).unwrap();
        }
        assert!(a.try_take(1));
        let giver = giving(&a, 1);
        assert_eq!(block_on(b.enter(1)), Ok(()));
        giver.join().unwrap();
        b.give(1);
        assert_eq!((budget.used(), budget.is_pressed()), (0, false));
    });
}

#[test]
fn two_spaces_in_the_budgets_line_are_both_served_when_two_return_at_once() {
    loom::model(|| {
        let budget = Budget::new(2);
        let spaces = [Space::new(2, 0), Space::new(2, 0), Space::new(2, 0)];
        for space in &spaces {
            space.join(&budget, 0, 0, || ()).unwrap();
        }
        assert!(spaces[0].try_take(2));
        let (first, second) = (spaces[1].enter(1), spaces[2].enter(1));
        let givers = [giving(&spaces[0], 1), giving(&spaces[0], 1)];
        assert_eq!((block_on(first), block_on(second)), (Ok(()), Ok(())));
        for giver in givers {
            giver.join().unwrap();
        }
        assert_eq!((budget.used(), budget.is_pressed()), (2, false));
    });
}
