//! Agents: what stands in the clocks for operations that complete later.
//!
//! A bulk copy, an asynchronous store or a warpgroup product touches memory at some moment between its issue
//! and the wait that covers it. Its accesses are recorded at the issue, stamped with an agent of the CTA and
//! the number of the phase or group that will tell of its end; whoever has seen that phase or group knows the
//! agent up to that number, and nobody else is ordered after the access. So one rule, that of races, also
//! finds missing waits. An agent's numbers complete in order.

/// What an agent stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agent {
    /// The CTA itself: epoch 1 says that it runs.
    Running,
    /// The grids before this one: epoch 1 says that they have completed.
    Grids,
    /// The copies that complete on the barrier at this shared byte; epochs are phases, from 1.
    Barrier(u32),
    /// The barriers that a thread initialised; epochs are its fences for them, from 1.
    Inits(u32),
    /// The reads of a thread's bulk stores; epochs are its bulk groups, from 1.
    Reads(u32),
    /// The writes of a thread's bulk stores; epochs are its bulk groups, from 1.
    Writes(u32),
    /// The products of a warp; epochs are its groups of products, from 1.
    Products(u32),
}

/// The agents of a CTA; in the clocks their numbers follow those of the threads.
#[derive(Debug)]
pub(super) struct Agents {
    first: u16,
    list: Vec<Agent>,
}

impl Agents {
    /// The agents that every CTA of so many threads has.
    pub fn new(threads: u32) -> Self {
        Self { first: threads as u16, list: vec![Agent::Running, Agent::Grids] }
    }

    /// The number of an agent, a new one if it has none yet.
    pub fn id(&mut self, agent: Agent) -> u16 {
        let known = self.list.iter().position(|other| *other == agent);
        let position = known.unwrap_or_else(|| {
            self.list.push(agent);
            self.list.len() - 1
        });
        self.first + position as u16
    }

    /// The agent with a number; `None` for a thread.
    pub fn get(&self, id: u16) -> Option<Agent> {
        let position = id.checked_sub(self.first)?;
        self.list.get(usize::from(position)).copied()
    }

    /// The number of the agent that says that the CTA runs, the same in every CTA of a grid.
    pub fn running(&self) -> u16 {
        self.first
    }

    /// The number of the agent that says that earlier grids have completed.
    pub fn grids(&self) -> u16 {
        self.first + 1
    }
}
