//! Which job a thread takes next: a queue for each file, so that one that hangs does not stop the others.

use super::{LANE_THREADS_MAX, THREADS_MAX};
use std::collections::{HashMap, VecDeque};

/// Jobs that may have to wait for each other: those of one file, by the address of its handle, which lives until they have ended. Zero for jobs
/// that belong to no file.
pub type LaneId = usize;

/// The queues of jobs `J` of a pool.
#[derive(Debug)]
pub(super) struct Lanes<J> {
    /// Those with jobs that wait or run.
    lanes: HashMap<LaneId, Lane<J>>,
    /// Lanes with jobs that wait, of which none runs: they come first, or jobs that hang could take all threads.
    starved: VecDeque<LaneId>,
    /// Other lanes that may start a job now, in turn.
    ready: VecDeque<LaneId>,
    /// Jobs that could start now if there were threads enough.
    startable: usize,
    waiting: usize,
}

#[derive(Debug)]
struct Lane<J> {
    running: usize,
    jobs: VecDeque<J>,
    /// In one of the two lists.
    listed: bool,
}

impl<J> Default for Lanes<J> {
    fn default() -> Self {
        let (starved, ready) = (VecDeque::new(), VecDeque::new());
        Self { lanes: HashMap::new(), starved, ready, startable: 0, waiting: 0 }
    }
}

impl<J> Lane<J> {
    fn startable(&self, id: LaneId) -> usize {
        let max = if id == 0 { THREADS_MAX } else { LANE_THREADS_MAX };
        self.jobs.len().min(max - self.running)
    }
}

impl<J> Lanes<J> {
    /// Jobs that could start now, and how many of them must: as many as there are lanes of which nothing runs.
    pub(super) fn startable(&self) -> (usize, usize) {
        (self.startable, self.starved.len())
    }

    /// Jobs that have not started.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Adds a job behind those of its lane.
    pub(super) fn push(&mut self, id: LaneId, job: J) {
        self.waiting += 1;
        let new = || Lane { running: 0, jobs: VecDeque::new(), listed: false };
        self.lanes.entry(id).or_insert_with(new).jobs.push_back(job);
        let lane = &self.lanes[&id];
        // It took one of the lane's free places, or none was left.
        let before = lane.jobs.len() - 1;
        self.startable += lane.startable(id) - before.min(lane.startable(id));
        self.list(id);
    }

    /// The next job of a thread; only one that must start if `must`. The thread calls [`Lanes::end`] after it.
    pub(super) fn take(&mut self, must: bool) -> Option<(LaneId, J)> {
        let id = self.starved.pop_front().or_else(|| if must { None } else { self.ready.pop_front() })?;
        let lane = self.lanes.get_mut(&id)?;
        lane.listed = false;
        let job = lane.jobs.pop_front()?;
        lane.running += 1;
        self.startable -= 1;
        self.waiting -= 1;
        self.list(id);
        Some((id, job))
    }

    /// A job of this lane has ended.
    pub(super) fn end(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        let before = lane.startable(id);
        lane.running -= 1;
        self.startable += lane.startable(id) - before;
        if lane.running == 0 && lane.listed {
            self.ready.retain(|i| *i != id);
            lane.listed = false;
        }
        self.list(id);
    }

    /// Puts a lane into the list where it belongs now, if it is in none.
    fn list(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        if lane.jobs.is_empty() && lane.running == 0 {
            self.lanes.remove(&id);
        } else if !lane.listed && lane.startable(id) > 0 {
            lane.listed = true;
            let list = if lane.running == 0 { &mut self.starved } else { &mut self.ready };
            list.push_back(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lanes_take_turns_and_one_without_running_jobs_comes_first() {
        let mut lanes = Lanes::default();
        for n in 0..20 {
            lanes.push(1, n);
            lanes.push(2, 100 + n);
        }
        assert_eq!((lanes.startable(), lanes.waiting()), ((32, 2), 40));
        let mut take = |must| lanes.take(must).map(|(_, n)| n);
        assert_eq!([take(true), take(true), take(true)], [Some(0), Some(100), None]);
        assert_eq!([take(false), take(false), take(false)], [Some(1), Some(101), Some(2)]);
        lanes.push(3, 200);
        assert_eq!(lanes.take(false), Some((3, 200)));
        (0..27).for_each(|_| assert!(lanes.take(false).is_some()));
        // Sixteen of each run.
        assert_eq!((lanes.take(false), lanes.startable(), lanes.waiting()), (None, (0, 0), 8));
        lanes.end(2);
        assert_eq!(lanes.take(false), Some((2, 116)));
    }

    proptest! {
        #[test]
        fn counts_are_right_and_nothing_is_lost(steps in proptest::collection::vec((0..3_u8, 0..4_usize, any::<bool>()), 0..400)) {
            let mut lanes = Lanes::default();
            let (mut pushed, mut taken) = (0, 0);
            let mut running: Vec<LaneId> = Vec::new();
            for (what, id, must) in steps {
                match what {
                    0 => {
                        lanes.push(id, pushed);
                        pushed += 1;
                    }
                    1 => {
                        let (startable, starved) = lanes.startable();
                        let job = lanes.take(must);
                        prop_assert_eq!(job.is_some(), if must { starved > 0 } else { startable > 0 });
                        taken += usize::from(job.is_some());
                        running.extend(job.map(|j| j.0));
                    }
                    _ => {
                        if let Some(id) = running.pop() {
                            lanes.end(id);
                        }
                    }
                }
                let sum: usize = lanes.lanes.iter().map(|(id, lane)| lane.startable(*id)).sum();
                let starved = lanes.lanes.values().filter(|l| l.running == 0).count();
                prop_assert_eq!(lanes.startable(), (sum, starved));
                prop_assert_eq!(lanes.waiting(), pushed - taken);
                let listed = lanes.lanes.iter().filter(|(id, l)| l.startable(**id) > 0).count();
                prop_assert_eq!(lanes.starved.len() + lanes.ready.len(), listed);
            }
            while let Some(id) = running.pop() {
                lanes.end(id);
            }
            while let Some((id, _)) = lanes.take(true) {
                taken += 1;
                lanes.end(id);
            }
            prop_assert_eq!((taken, lanes.lanes.len()), (pushed, 0));
        }
    }
}
