//! The named groups of a context.

use super::config::ThrottleLimits;
use super::group::Group;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::rt::Clock;
use crate::sync::{Arc, Mutex};
use std::collections::BTreeMap;

/// Groups by name; what `--object throttle-group` makes. All methods may be called from any thread and never block.
#[derive(Debug)]
pub struct ThrottleGroups {
    clock: Arc<dyn Clock>,
    by_name: Mutex<BTreeMap<String, Arc<Group>>>,
}

/// Most groups of a context.
const GROUPS_MAX: usize = 4096;
/// Longest name of a group, in bytes.
const NAME_LEN_MAX: usize = 127;

impl ThrottleGroups {
    /// No groups yet.
    pub fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { clock, by_name: Mutex::default() })
    }

    /// Makes the group `name` from its object's options: `limits.*` (or the same keys with `x-` before them, as in
    /// `x-bps-write`), and nothing else; `qom-type` and `id` have been taken out before.
    pub fn create(&self, name: &str, mut options: Options) -> Result<Arc<Group>> {
        if name.is_empty() || name.len() > NAME_LEN_MAX {
            return Err(Error::invalid(format!(
                "a throttle group needs a name ('id') of 1..={NAME_LEN_MAX} bytes"
            )));
        }
        let limits = ThrottleLimits::take(&mut options, "limits.")?;
        let old_keys = ThrottleLimits::take(&mut options, "x-")?;
        options.finish()?;
        if limits.is_some() && old_keys.is_some() {
            return Err(Error::invalid(
                "options 'limits' and 'x-...' of a throttle group exclude each other",
            ));
        }
        let limits = limits.or(old_keys).unwrap_or_default();
        let mut by_name = self.by_name.lock();
        if by_name.contains_key(name) {
            return Err(Error::busy(format!("there is a throttle group named '{name}' already")));
        }
        if by_name.len() >= GROUPS_MAX {
            return Err(Error::busy(format!("there are {GROUPS_MAX} throttle groups already")));
        }
        let group = Group::new(name, limits, self.clock.clone());
        by_name.insert(name.to_owned(), group.clone());
        Ok(group)
    }

    /// A group by name.
    pub fn find(&self, name: &str) -> Result<Arc<Group>> {
        let found = self.by_name.lock().get(name).cloned();
        found.ok_or_else(|| {
            Error::not_found(format!("no throttle group named '{name}' (option 'throttle-group')"))
        })
    }

    /// Forgets a group. Refused while it has members.
    pub fn remove(&self, name: &str) -> Result<()> {
        let group = self.find(name)?;
        let mut by_name = self.by_name.lock();
        if group.members() > 0 {
            return Err(Error::busy(format!("throttle group '{name}' is in use")));
        }
        by_name.remove(name);
        Ok(())
    }

    /// The names of all groups.
    pub fn names(&self) -> Vec<String> {
        self.by_name.lock().keys().cloned().collect()
    }
}
