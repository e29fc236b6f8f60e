use super::*;
use crate::error::{Code, IoError, IoResult};
use crate::graph::{Disk, Graph};
use crate::io::{EngineKind, system_env};
use crate::node::{Extent, ExtentFlags, Limits, Node, Vertex};
use crate::queue::virtual_env::virtual_env;
use crate::queue::{Cqe, Cx, Env, HostReq, Queue};
use crate::request::{Buffers, Class, Flags, Request};
use crate::rt::Rng;
use crate::rt::real::SplitMix;
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst};
use crate::sync::{Arc, Mutex, Weak, thread};
use crate::units::ByteRange;
use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;

/// A program with a disk in memory.
struct Program {
    limits: Mutex<HostLimits>,
    data: Mutex<Vec<u8>>,
    log: Mutex<Vec<(HostOp, ByteRange, Flags)>>,
    /// Keep operations instead of carrying them out.
    hold: AtomicBool,
    held: Mutex<Vec<HostIo>>,
    /// Hand operations to threads.
    threads: Mutex<Option<mpsc::Sender<HostIo>>>,
    /// Operations that are answered with ENOTSUP.
    unsupported: Mutex<Vec<HostOp>>,
    /// Result of the next transfer, if not -1000.
    next_result: AtomicI64,
    can_cancel: AtomicBool,
    cancels: AtomicUsize,
    running: AtomicUsize,
    running_max: AtomicUsize,
    dropped: Arc<AtomicUsize>,
}

const UNSET: i64 = -1000;

impl Program {
    fn new(limits: HostLimits) -> Arc<Self> {
        Arc::new(Self {
            data: Mutex::new(vec![0; limits.limits.size as usize]),
            limits: Mutex::new(limits),
            log: Mutex::default(),
            hold: AtomicBool::new(false),
            held: Mutex::default(),
            threads: Mutex::default(),
            unsupported: Mutex::default(),
            next_result: AtomicI64::new(UNSET),
            can_cancel: AtomicBool::new(false),
            cancels: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            running_max: AtomicUsize::new(0),
            dropped: Arc::default(),
        })
    }

    fn holding(limits: HostLimits) -> Arc<Self> {
        let program = Self::new(limits);
        program.hold.store(true, SeqCst);
        program
    }

    fn log(&self) -> Vec<(HostOp, ByteRange, Flags)> {
        self.log.lock().clone()
    }

    fn held(&self) -> usize {
        self.held.lock().len()
    }

    /// Carries out the operation that has been held longest.
    fn release_one(&self) {
        let io = self.held.lock().remove(0);
        self.serve(&io);
    }

    fn serve(&self, io: &HostIo) {
        self.running.fetch_sub(1, SeqCst);
        if self.unsupported.lock().contains(&io.op()) {
            io.complete(-i64::from(libc::ENOTSUP));
            return;
        }
        let forced = self.next_result.swap(UNSET, SeqCst);
        let len =
            if forced >= 0 { forced.min(io.range().len as i64) as usize } else { io.range().len as usize };
        let at = io.range().offset as usize;
        let bufs = io.buffers();
        {
            let mut data = self.data.lock();
            match io.op() {
                HostOp::Request(Op::Read) => bufs.slice(0, len).copy_from_slice(&data[at..at + len]),
                HostOp::Request(Op::Write) => bufs.slice(0, len).copy_to_slice(&mut data[at..at + len]),
                HostOp::Request(Op::WriteZeroes | Op::Discard) => data[at..at + len].fill(0),
                HostOp::Request(Op::Flush) => {}
                HostOp::BlockStatus => {
                    drop(data);
                    io.complete_status(Extent::hole(1000));
                    return;
                }
            }
        }
        io.complete(if forced == UNSET { len as i64 } else { forced });
    }
}

impl HostBackend for Program {
    fn limits(&self) -> HostLimits {
        *self.limits.lock()
    }

    fn submit(&self, io: HostIo) {
        let limits = self.limits.lock().limits;
        let align = u64::from(limits.request_align);
        assert_eq!((io.range().offset | io.range().len) % align, 0, "{io:?}");
        let memory_align = limits.memory_align as usize;
        let addresses = io.buffers().segments().iter().map(|s| s.as_ptr().addr()).collect::<Vec<_>>();
        assert!(addresses.iter().all(|a| a.is_multiple_of(memory_align)), "{io:?}");
        assert!(io.buffers().segments().len() <= limits.max_iov as usize, "{io:?}");
        assert!(limits.max_transfer == 0 || io.buffers().len() <= limits.max_transfer as usize, "{io:?}");
        self.log.lock().push((io.op(), io.range(), io.flags()));
        let running = self.running.fetch_add(1, SeqCst) + 1;
        self.running_max.fetch_max(running, SeqCst);
        if self.hold.load(SeqCst) {
            self.held.lock().push(io);
        } else if let Some(threads) = &*self.threads.lock() {
            threads.send(io).unwrap();
        } else {
            self.serve(&io);
        }
    }

    fn cancel(&self, io: &HostIo) -> bool {
        self.cancels.fetch_add(1, SeqCst);
        if self.can_cancel.load(SeqCst) {
            let mut held = self.held.lock();
            let at = held.iter().position(|h| Arc::ptr_eq(h.state(), io.state()));
            let found = at.map(|at| held.remove(at));
            drop(held);
            if let Some(io) = found {
                self.running.fetch_sub(1, SeqCst);
                io.complete(-i64::from(libc::ECANCELED));
            }
        }
        self.can_cancel.load(SeqCst)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, SeqCst);
    }
}

fn env() -> Arc<Env> {
    system_env(EngineKind::Threads, None)
}

fn node(env: &Arc<Env>, program: &Arc<Program>, concurrency: Concurrency) -> Arc<HostNode> {
    HostNode::new(env, program.clone(), HostOptions { concurrency, timeout_ms: 0 }).unwrap()
}

fn aligned(size: u64, request_align: u32, memory_align: u32) -> HostLimits {
    let limits = Limits { request_align, memory_align, ..Limits::plain(size) };
    HostLimits { limits, ..HostLimits::plain(size) }
}

/// One request on a node of its own environment.
fn run(env: &Arc<Env>, node: &HostNode, req: Request) -> IoResult {
    env.block_on(|cx| async move { cx.run(node, req).await }).unwrap()
}

fn disk(env: &Arc<Env>, node: &Arc<HostNode>) -> (Arc<Graph>, Arc<Disk>) {
    let graph = Graph::new(env.clone());
    let disk = graph.add_disk("d").unwrap();
    graph.insert(&disk, Some(Vertex::new("h", node.clone()))).unwrap();
    (graph, disk)
}

fn submit(queue: &Queue, user_data: u64, req: Request) {
    let mut reqs = vec![HostReq { user_data, op: crate::queue::HostOp::Io(req) }];
    assert_eq!(queue.submit(&mut reqs), 1);
}

fn reap(queue: &Queue, min: usize) -> Vec<Cqe> {
    let mut out = Vec::new();
    queue.reap(&mut out, 64, min, None);
    out
}

fn write(offset: u64, len: usize, byte: u8) -> Request {
    let bufs = Buffers::alloc(len, 4096);
    bufs.fill(byte);
    Request::write(offset, bufs)
}

const REQUEST_WRITE: HostOp = HostOp::Request(Op::Write);

#[test]
fn data_goes_through_without_a_copy_and_in_one_piece() {
    let env = env();
    let program = Program::holding(HostLimits::plain(1 << 20));
    let node = node(&env, &program, Concurrency::Parallel);
    let (_graph, disk) = disk(&env, &node);
    let queue = Queue::new(&disk, 4).unwrap();
    let mut bufs = Buffers::from_bytes(b"one");
    bufs.append(Buffers::from_bytes(b" two"));
    let addresses =
        |b: &Buffers| b.segments().iter().map(|s| (s.as_ptr().addr(), s.len())).collect::<Vec<_>>();
    submit(&queue, 1, Request::write(7, bufs.clone()).flags(Flags::FUA).class(Class::Lazy));
    {
        let held = program.held.lock();
        assert_eq!((held[0].op(), held[0].range()), (REQUEST_WRITE, ByteRange { offset: 7, len: 7 }));
        assert_eq!(held[0].class(), Class::Lazy);
        assert_eq!(addresses(&held[0].buffers()), addresses(&bufs));
    }
    program.release_one();
    assert!(reap(&queue, 0).is_empty(), "FUA is a write and a flush");
    program.release_one();
    assert_eq!(reap(&queue, 1)[0].res, 7);
    assert_eq!(program.data.lock()[6..15], *b"\0one two\0");
    let log = program.log();
    assert_eq!((log.len(), log[0].2, log[1].0), (2, Flags::empty(), HostOp::Request(Op::Flush)));
}

#[test]
fn fua_is_passed_to_a_backend_that_honours_it() {
    let env = env();
    let program = Program::new(HostLimits { fua: true, ..HostLimits::plain(4096) });
    let node = node(&env, &program, Concurrency::Serial);
    run(&env, &node, write(0, 512, 1).flags(Flags::FUA)).unwrap();
    let zeroes = ByteRange { offset: 0, len: 512 };
    run(&env, &node, Request::write_zeroes(zeroes, Flags::FUA | Flags::MAY_UNMAP)).unwrap();
    let flags: Vec<_> = program.log().iter().map(|l| l.2).collect();
    assert_eq!(flags, [Flags::FUA, Flags::FUA | Flags::MAY_UNMAP]);
}

#[test]
fn completions_from_many_threads_reach_the_right_requests() {
    let env = env();
    env.start(1).unwrap();
    let program = Program::new(HostLimits::plain(1 << 20));
    let (sender, receiver) = mpsc::channel::<HostIo>();
    *program.threads.lock() = Some(sender);
    let receiver = Arc::new(Mutex::new(receiver));
    let servers: Vec<_> = (0..3)
        .map(|i| {
            let (receiver, program) = (receiver.clone(), program.clone());
            thread::spawn(move || {
                let random = SplitMix::new(i);
                let mut kept: Vec<HostIo> = Vec::new();
                loop {
                    // A few are kept back and answered out of order, as long as more come.
                    let next = receiver.lock().try_recv();
                    match next {
                        Ok(io) => kept.push(io),
                        Err(mpsc::TryRecvError::Disconnected) if kept.is_empty() => return,
                        Err(_) if kept.is_empty() => thread::yield_now(),
                        Err(_) => {}
                    }
                    if kept.len() > 3 || !kept.is_empty() && random.next().is_multiple_of(2) {
                        let io = kept.swap_remove(random.next() as usize % kept.len());
                        program.serve(&io);
                    }
                }
            })
        })
        .collect();
    let node = node(&env, &program, Concurrency::Parallel);
    let (_graph, disk) = disk(&env, &node);
    let clients: Vec<_> = (0..2u64)
        .map(|client| {
            let disk = disk.clone();
            thread::spawn(move || {
                let queue = Queue::new(&disk, 16).unwrap();
                for round in 0..100u64 {
                    let slot = |i: u64| client * (512 << 10) + i * 1024;
                    let byte = |i: u64| (round * 31 + i * 7 + client) as u8;
                    (0..16).for_each(|i| submit(&queue, i, write(slot(i), 1024, byte(i))));
                    let mut done: Vec<_> = Vec::new();
                    while done.len() < 16 {
                        done.extend(reap(&queue, 16 - done.len()));
                    }
                    done.sort_by_key(|c| c.user_data);
                    assert!(done.iter().enumerate().all(|(i, c)| (c.user_data, c.res) == (i as u64, 1024)));
                    let back: Vec<_> = (0..16).map(|_| Buffers::alloc(1024, 512)).collect();
                    (0..16).for_each(|i| submit(&queue, i, Request::read(slot(i), back[i as usize].clone())));
                    let mut n = 0;
                    while n < 16 {
                        n += reap(&queue, 16 - n).len();
                    }
                    for i in 0..16 {
                        assert_eq!(back[i as usize].to_vec(), vec![byte(i); 1024]);
                    }
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|c| c.join().unwrap());
    assert_eq!(program.log().len(), 2 * 100 * 32);
    assert!(program.running_max.load(SeqCst) > 1, "operations did overlap");
    assert_eq!(node.in_flight(), 0);
    *program.threads.lock() = None;
    servers.into_iter().for_each(|s| s.join().unwrap());
}

#[test]
fn a_second_completion_is_ignored_and_logged() {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let sink = lines.clone();
    let log = Box::new(move |_: i32, _: &str, text: &str| sink.lock().push(text.to_owned()));
    let env = system_env(EngineKind::Threads, Some(log));
    let program = Program::holding(HostLimits::plain(4096));
    let node = node(&env, &program, Concurrency::Parallel);
    let (_graph, disk) = disk(&env, &node);
    let queue = Queue::new(&disk, 4).unwrap();
    submit(&queue, 1, write(0, 512, 1));
    let io = program.held.lock().remove(0);
    // As the C layer does it: by address, with a reference that the first completion ends.
    let state = io.into_state();
    let address = Arc::downgrade(&state);
    assert!(state.complete(512));
    drop(state);
    let again = address.upgrade().expect("remembered for a while");
    assert!(!again.complete(-5));
    assert!(!again.complete(512));
    assert!(HostIo::from(again).buffers().is_empty(), "memory is given back at completion");
    assert_eq!(reap(&queue, 1)[0].res, 512);
    assert!(reap(&queue, 0).is_empty());
    assert_eq!(lines.lock().iter().filter(|l| l.contains("completed twice")).count(), 2);
}

#[test]
fn completed_tokens_are_not_remembered_for_ever() {
    let env = env();
    let program = Program::new(HostLimits::plain(4096));
    let node = node(&env, &program, Concurrency::Parallel);
    program.hold.store(true, SeqCst);
    let (_graph, disk) = disk(&env, &node);
    let queue = Queue::new(&disk, 4).unwrap();
    submit(&queue, 1, write(0, 512, 1));
    let first = Arc::downgrade(program.held.lock()[0].state());
    program.release_one();
    program.hold.store(false, SeqCst);
    reap(&queue, 1);
    assert!(first.upgrade().is_some());
    for _ in 0..300 {
        run(&env, &node, write(0, 512, 1)).unwrap();
    }
    assert!(first.upgrade().is_none());
}

#[test]
fn a_token_that_is_dropped_fails_its_request() {
    let env = env();
    let program = Program::holding(HostLimits::plain(4096));
    let node = node(&env, &program, Concurrency::Serial);
    let (_graph, disk) = disk(&env, &node);
    let queue = Queue::new(&disk, 4).unwrap();
    submit(&queue, 1, write(0, 512, 1));
    submit(&queue, 2, write(0, 512, 1));
    let clone = program.held.lock()[0].clone();
    program.held.lock().clear();
    assert!(reap(&queue, 0).is_empty(), "a clone is the same operation");
    drop(clone);
    assert_eq!(reap(&queue, 1)[0].res, -i64::from(libc::EIO));
    assert_eq!(program.held(), 1, "its turn has gone to the next");
    program.release_one();
    assert_eq!(reap(&queue, 1)[0].res, 512);
    assert!(node.last_error().unwrap().contains("write of 512 bytes at 0"));
}

#[test]
fn a_serial_backend_has_one_operation_at_a_time_in_order_of_arrival() {
    let env = env();
    let program = Program::holding(HostLimits::plain(1 << 20));
    let node = node(&env, &program, Concurrency::Serial);
    let (_graph, disk) = disk(&env, &node);
    let queues = [Queue::new(&disk, 8).unwrap(), Queue::new(&disk, 8).unwrap()];
    for i in 0..6u64 {
        submit(&queues[i as usize % 2], i, write(i * 4096, 512, 1));
    }
    assert_eq!(program.held(), 1);
    // The third is cancelled while it waits for its turn: it never reaches the program.
    assert_eq!(queues[0].cancel(2), 1);
    let cancelled = reap(&queues[0], 1);
    assert_eq!((cancelled[0].user_data, cancelled[0].code), (2, Code::Cancelled));
    let mut done = 0;
    while done < 5 {
        if program.held() > 0 {
            assert_eq!(program.held(), 1);
            program.release_one();
        }
        done += queues.iter().map(|q| reap(q, 0).len()).sum::<usize>();
    }
    assert_eq!(program.running_max.load(SeqCst), 1);
    let offsets: Vec<_> = program.log().iter().map(|l| l.1.offset / 4096).collect();
    assert_eq!(offsets, [0, 1, 3, 4, 5]);
}

#[test]
fn a_turn_given_up_after_it_was_handed_over_goes_to_the_next() {
    let env = env();
    let program = Program::holding(HostLimits::plain(1 << 20));
    let node = node(&env, &program, Concurrency::Serial);
    let (_graph, disk) = disk(&env, &node);
    let queues = [Queue::new(&disk, 8).unwrap(), Queue::new(&disk, 8).unwrap()];
    submit(&queues[0], 0, write(0, 512, 1));
    submit(&queues[1], 1, write(4096, 512, 1));
    submit(&queues[0], 2, write(8192, 512, 1));
    program.release_one();
    // The lane was handed to the second queue, which has not been driven since.
    assert_eq!(program.held(), 0);
    queues[1].cancel(1);
    assert_eq!(reap(&queues[1], 1)[0].code, Code::Cancelled);
    let mut done = 0;
    while done < 2 {
        if program.held() > 0 {
            program.release_one();
        }
        done += reap(&queues[0], 0).len();
    }
    assert_eq!(program.log().len(), 2);
}

#[test]
fn a_backend_per_queue_has_one_operation_of_each_queue() {
    let env = env();
    let program = Program::holding(HostLimits::plain(1 << 20));
    let node = node(&env, &program, Concurrency::PerQueue);
    let (_graph, disk) = disk(&env, &node);
    let queues = [Queue::new(&disk, 8).unwrap(), Queue::new(&disk, 8).unwrap()];
    for i in 0..6u64 {
        submit(&queues[i as usize % 2], i, write(i * 4096, 512, 1));
    }
    let offsets: Vec<_> = program.log().iter().map(|l| l.1.offset / 4096).collect();
    assert_eq!(offsets, [0, 1]);
    let mut done = 0;
    while done < 6 {
        if program.held() > 0 {
            program.release_one();
        }
        done += queues.iter().map(|q| reap(q, 0).len()).sum::<usize>();
    }
    assert_eq!(program.running_max.load(SeqCst), 2);
}

#[test]
fn a_parallel_backend_has_everything_at_once() {
    let env = env();
    let program = Program::holding(HostLimits::plain(1 << 20));
    let node = node(&env, &program, Concurrency::Parallel);
    let (_graph, disk) = disk(&env, &node);
    let queue = Queue::new(&disk, 8).unwrap();
    (0..8).for_each(|i| submit(&queue, i, write(0, 512, 1)));
    assert_eq!((program.held(), node.in_flight()), (8, 8));
    (0..8).for_each(|_| program.release_one());
    assert_eq!(reap(&queue, 8).len(), 8);
}

#[test]
fn a_cancelled_request_is_the_programs_until_the_program_completes_it() {
    let env = env();
    let program = Program::holding(HostLimits::plain(4096));
    let node = node(&env, &program, Concurrency::Parallel);
    let (_graph, disk) = disk(&env, &node);
    let queue = Queue::new(&disk, 4).unwrap();
    submit(&queue, 1, write(0, 512, 1));
    queue.cancel(1);
    assert!(reap(&queue, 0).is_empty());
    assert_eq!(program.cancels.load(SeqCst), 1, "the program was asked");
    assert_eq!(program.held.lock()[0].buffers().len(), 512, "and still has the memory");
    program.release_one();
    assert_eq!(reap(&queue, 1)[0].res, 512, "a result that is there counts");
    program.can_cancel.store(true, SeqCst);
    submit(&queue, 2, write(0, 512, 1));
    queue.cancel(2);
    assert_eq!(reap(&queue, 1)[0].res, -i64::from(libc::ECANCELED));
}

#[test]
fn the_end_of_a_queue_cancels_what_the_program_holds() {
    let env = env();
    let program = Program::holding(HostLimits::plain(4096));
    program.can_cancel.store(true, SeqCst);
    let node = node(&env, &program, Concurrency::Serial);
    let (_graph, disk) = disk(&env, &node);
    let queue = Queue::new(&disk, 4).unwrap();
    (0..4).for_each(|i| submit(&queue, i, write(0, 512, 1)));
    assert_eq!(program.held(), 1);
    drop(queue);
    assert_eq!((program.held(), node.in_flight()), (0, 0));
    assert_eq!(program.log().len(), 1);
}

#[test]
fn an_operation_that_takes_too_long_times_out() {
    let (env, _) = virtual_env(0);
    let program = Program::holding(HostLimits::plain(4096));
    program.can_cancel.store(true, SeqCst);
    let node = node(&env, &program, Concurrency::Serial);
    node.set("timeout-ms", "1500").unwrap();
    assert_eq!(node.get("timeout-ms").as_deref(), Some("1500"));
    assert!(node.set("timeout-ms", "soon").is_err() && node.set("size", "1").is_err());
    assert_eq!(run(&env, &node, write(0, 512, 1)), Err(IoError::os(libc::ETIMEDOUT)));
    assert_eq!(env.runtime.clock.now().0, 1_500_000_000);
    program.hold.store(false, SeqCst);
    run(&env, &node, write(0, 512, 1)).unwrap();
    assert_eq!(env.runtime.clock.now().0, 1_500_000_000);
}

#[test]
fn what_the_program_does_not_support_is_emulated() {
    let env = env();
    let program = Program::new(HostLimits::plain(3 << 20));
    let all = [Op::WriteZeroes, Op::Discard, Op::Flush].map(HostOp::Request);
    program.unsupported.lock().extend(all);
    program.unsupported.lock().push(HostOp::BlockStatus);
    let node = node(&env, &program, Concurrency::Serial);
    run(&env, &node, write(0, 3 << 20, 7)).unwrap();
    let range = ByteRange { offset: 1000, len: 2 << 20 };
    let strict = Request::write_zeroes(range, Flags::NO_FALLBACK);
    assert_eq!(run(&env, &node, strict), Err(IoError::unsupported()));
    run(&env, &node, Request::write_zeroes(range, Flags::FUA)).unwrap();
    let mut expected = vec![7; 3 << 20];
    expected[1000..1000 + (2 << 20)].fill(0);
    assert!(*program.data.lock() == expected);
    let pieces: Vec<_> =
        program.log().iter().skip(3).filter(|l| l.0 == REQUEST_WRITE).map(|l| l.1.len).collect();
    assert_eq!(pieces.iter().sum::<u64>(), 2 << 20);
    assert!(pieces.iter().all(|len| *len <= 1 << 20), "{pieces:?}");
    run(&env, &node, Request::discard(range)).unwrap();
    run(&env, &node, Request::flush()).unwrap();
    assert!(*program.data.lock() == expected);
    let status = env.block_on(|cx| async move { cx.status(&*node, range).await }).unwrap();
    assert_eq!(status, Ok(Extent::data(range.len)));
}

#[test]
fn an_unsupported_read_or_write_is_an_error() {
    let env = env();
    let program = Program::new(HostLimits::plain(4096));
    program.unsupported.lock().extend([Op::Read, Op::Write].map(HostOp::Request));
    let node = node(&env, &program, Concurrency::Serial);
    assert_eq!(run(&env, &node, write(0, 512, 1)), Err(IoError::unsupported()));
    assert_eq!(run(&env, &node, Request::read(0, Buffers::alloc(1, 1))), Err(IoError::unsupported()));
}

#[test]
fn short_transfers_go_on_and_wrong_results_are_errors() {
    let env = env();
    let program = Program::new(HostLimits::plain(1 << 16));
    let node = node(&env, &program, Concurrency::Serial);
    for short in [1, 100, 511, 1023] {
        program.next_result.store(short, SeqCst);
        run(&env, &node, write(0, 1024, short as u8)).unwrap();
        assert!(program.data.lock()[..1024].iter().all(|b| *b == short as u8));
        program.next_result.store(short, SeqCst);
        let back = Buffers::alloc(1024, 512);
        run(&env, &node, Request::read(0, back.clone())).unwrap();
        assert_eq!(back.to_vec(), vec![short as u8; 1024]);
        let log = program.log();
        let last: Vec<_> = log[log.len() - 2..].iter().map(|l| (l.1.offset, l.1.len)).collect();
        assert_eq!(last, [(0, 1024), (short as u64, 1024 - short as u64)]);
    }
    for wrong in [0, 1025, i64::MAX] {
        program.next_result.store(wrong, SeqCst);
        assert_eq!(run(&env, &node, write(0, 1024, 1)), Err(IoError::os(libc::EIO)), "{wrong}");
    }
    for (res, errno) in [(-28, libc::ENOSPC), (-4096, libc::EIO), (i64::MIN, libc::EIO)] {
        program.next_result.store(res, SeqCst);
        assert_eq!(run(&env, &node, write(0, 1024, 1)), Err(IoError::os(errno)));
    }
}

/// `bytes` in a buffer at an odd address, in two segments.
fn odd_buffers(bytes: &[u8]) -> Buffers {
    let all = Buffers::alloc(bytes.len() + 1, 4096).slice(1, bytes.len());
    let mut bufs = all.slice(0, bytes.len() / 3);
    bufs.append(all.slice(bytes.len() / 3, bytes.len() - bytes.len() / 3));
    bufs.copy_from_slice(bytes);
    bufs
}

#[test]
fn any_range_and_memory_works_with_any_alignment_and_limit() {
    let env = env();
    const SIZE: u64 = 64;
    for (align, memory, transfer, iov) in [
        (1, 1, 0, 0),
        (8, 1, 0, 1),
        (8, 16, 0, 2),
        (1, 16, 16, 1),
        (16, 8, 32, 1),
        (64, 64, 0, 0),
        (4, 2, 4, 3),
    ] {
        let mut limits = aligned(SIZE, align, memory);
        (limits.limits.max_transfer, limits.limits.max_iov) = (transfer, iov);
        (limits.max_zeroes, limits.max_discard) = (24, 8);
        limits.limits.max_iov = if iov == 0 { 1024 } else { iov };
        let program = Program::new(limits);
        let node = node(&env, &program, Concurrency::Parallel);
        let mut model = vec![0u8; SIZE as usize];
        let mut next = 0u8;
        let step = |op: Op, offset: u64, len: u64| {
            next = next.wrapping_add(1);
            let span = offset as usize..(offset + len) as usize;
            let range = ByteRange { offset, len };
            let req = match op {
                Op::Read => {
                    let bufs = odd_buffers(&vec![0xee; len as usize]);
                    let (inner, back) = (node.clone(), bufs.clone());
                    env.block_on(|cx| async move { cx.run(&*inner, Request::read(offset, back)).await })
                        .unwrap()
                        .unwrap();
                    assert_eq!(bufs.to_vec(), model[span], "{align} {memory} {offset}+{len}");
                    return;
                }
                Op::Write => {
                    model[span].fill(next);
                    Request::write(offset, odd_buffers(&vec![next; len as usize]))
                }
                Op::WriteZeroes => {
                    model[span].fill(0);
                    Request::write_zeroes(range, Flags::empty())
                }
                _ => Request::discard(range),
            };
            run(&env, &node, req).unwrap();
            if op == Op::Discard {
                // What it leaves is the backend's choice, but only inside the range.
                let data = program.data.lock().clone();
                assert!((0..SIZE).all(|i| range.contains(ByteRange { offset: i, len: 1 })
                    || data[i as usize] == model[i as usize]));
                model = data;
            }
            assert_eq!(*program.data.lock(), model, "{op:?} {align} {memory} {offset}+{len}");
        };
        let mut step = step;
        for offset in 0..SIZE {
            for len in [1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 63, 64]
                .into_iter()
                .filter(|l| offset + l <= SIZE)
            {
                step(Op::Write, offset, len);
                step(Op::Read, offset, len);
                step(Op::WriteZeroes, offset, len);
                step(Op::Write, 0, SIZE);
                step(Op::Discard, offset, len);
            }
        }
    }
}

#[test]
fn neighbours_in_one_block_do_not_undo_each_other() {
    let env = env();
    env.start(1).unwrap();
    let program = Program::new(aligned(4096, 512, 512));
    let (sender, receiver) = mpsc::channel::<HostIo>();
    *program.threads.lock() = Some(sender);
    let server = {
        let program = program.clone();
        thread::spawn(move || receiver.iter().for_each(|io| program.serve(&io)))
    };
    let node = node(&env, &program, Concurrency::Parallel);
    let (_graph, disk) = disk(&env, &node);
    let clients: Vec<_> = (0..2u64)
        .map(|client| {
            let disk = disk.clone();
            thread::spawn(move || {
                let queue = Queue::new(&disk, 4).unwrap();
                for round in 0..100u8 {
                    // Four slots of 64 bytes of the same block each, and a whole block beside them that both write.
                    for i in 0..4u64 {
                        submit(&queue, i, write((client * 4 + i) * 64, 64, round));
                    }
                    let mut n = 0;
                    while n < 4 {
                        n += reap(&queue, 4 - n).iter().inspect(|c| assert_eq!(c.res, 64)).count();
                    }
                    let back = Buffers::alloc(256, 64);
                    submit(&queue, 9, Request::read(client * 256, back.clone()));
                    assert_eq!(reap(&queue, 1)[0].res, 256);
                    assert_eq!(back.to_vec(), vec![round; 256], "client {client}");
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|c| c.join().unwrap());
    *program.threads.lock() = None;
    server.join().unwrap();
    assert!(program.data.lock()[..512].iter().all(|b| *b == 99));
}

#[test]
fn block_status_is_the_programs_cut_to_the_question() {
    let env = env();
    let program = Program::new(aligned(1 << 20, 512, 1));
    let node = node(&env, &program, Concurrency::Serial);
    // The program says 1000 bytes of hole from where it is asked.
    for (offset, len, expected) in [
        (0, 4096, Extent::hole(1000)),
        (0, 10, Extent::hole(10)),
        (100, 4096, Extent::hole(900)),
        (511, 1, Extent::hole(1)),
    ] {
        let inner = node.clone();
        let status =
            env.block_on(|cx| async move { cx.status(&*inner, ByteRange { offset, len }).await }).unwrap();
        assert_eq!(status, Ok(expected), "{offset}+{len}");
    }
    assert!(Extent::hole(1).flags.contains(ExtentFlags::ZERO));
}

/// Polls a future that is not ready yet.
async fn poll_once<F: Future + ?Sized>(mut future: Pin<&mut F>) {
    let pending =
        std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await;
    assert!(pending);
}

#[test]
fn the_backend_is_released_once_after_the_last_token() {
    let env = env();
    let program = Program::holding(HostLimits::plain(4096));
    program.can_cancel.store(true, SeqCst);
    let dropped = program.dropped.clone();
    let node = node(&env, &program, Concurrency::Parallel);
    // A future that is dropped while the program has the operation.
    let inner = node.clone();
    env.block_on(|cx: Cx| async move {
        let mut detached = Box::pin(async { cx.run(&*inner, write(0, 512, 1)).await });
        poll_once(detached.as_mut()).await;
    })
    .unwrap();
    assert_eq!((node.in_flight(), program.held()), (1, 1));
    let io = program.held.lock().remove(0);
    assert_eq!(io.buffers().len(), 512, "memory outlives the future");
    drop((node, program));
    assert_eq!(dropped.load(SeqCst), 0);
    io.complete(512);
    drop(io);
    assert_eq!(dropped.load(SeqCst), 1);
}

#[test]
fn settle_waits_for_operations_without_a_future() {
    let env = env();
    let program = Program::holding(HostLimits::plain(4096));
    let node = node(&env, &program, Concurrency::Parallel);
    env.block_on(|cx: Cx| async move {
        let mut detached = Box::pin(async { cx.run(&*node, write(0, 512, 1)).await });
        poll_once(detached.as_mut()).await;
        drop(detached);
        let mut settle = node.settle(&cx);
        poll_once(settle.as_mut()).await;
        program.release_one();
        settle.await.unwrap();
        assert_eq!(node.in_flight(), 0);
    })
    .unwrap();
}

/// A program that misbehaves in `submit`.
struct Rude {
    env: Weak<Env>,
    refused: AtomicUsize,
    panics: bool,
}

impl HostBackend for Rude {
    fn limits(&self) -> HostLimits {
        HostLimits::plain(4096)
    }

    fn submit(&self, io: HostIo) {
        assert!(!self.panics, "a bug of the program");
        let nested = self.env.upgrade().unwrap().block_on(|_| async {});
        self.refused.store(nested.unwrap_err().errno() as usize, SeqCst);
        io.complete(io.range().len as i64);
    }
}

#[test]
fn a_call_that_may_block_is_refused_inside_a_callback() {
    let env = env();
    let rude = Arc::new(Rude { env: Arc::downgrade(&env), refused: AtomicUsize::new(0), panics: false });
    let node = HostNode::new(&env, rude.clone(), HostOptions::default()).unwrap();
    run(&env, &node, write(0, 512, 1)).unwrap();
    assert_eq!(rude.refused.load(SeqCst), libc::EDEADLK as usize);
}

#[test]
fn a_panic_of_the_program_breaks_the_node_and_nothing_else() {
    let env = env();
    let rude = Arc::new(Rude { env: Weak::new(), refused: AtomicUsize::new(0), panics: true });
    let node = HostNode::new(&env, rude, HostOptions::default()).unwrap();
    for _ in 0..2 {
        assert_eq!(run(&env, &node, write(0, 512, 1)), Err(IoError::panicked()));
    }
    assert_eq!(node.in_flight(), 0);
    assert!(node.last_error().is_some());
}

#[test]
fn limits_that_make_no_sense_are_refused_and_a_new_size_is_taken() {
    let env = env();
    let with = |change: fn(&mut HostLimits)| {
        let mut limits = HostLimits::plain(4096);
        change(&mut limits);
        HostNode::new(&env, Program::new(limits), HostOptions::default()).map(|n| n.limits())
    };
    let odd: [fn(&mut HostLimits); 5] = [
        |l| l.limits.request_align = 3,
        |l| l.limits.memory_align = 2 << 20,
        |l| l.limits.request_align = 8192,
        |l| l.limits.discard_align = 1000,
        |l| (l.limits.max_transfer, l.limits.request_align) = (256, 512),
    ];
    for change in odd {
        assert_eq!(with(change).unwrap_err().errno(), libc::EINVAL);
    }
    let zeros =
        with(|l| (l.limits.request_align, l.limits.memory_align, l.limits.max_iov) = (0, 0, 0)).unwrap();
    assert_eq!((zeros.request_align, zeros.memory_align), (1, 1));
    assert!(zeros.max_iov > 0);

    let program = Program::new(aligned(4096, 512, 1));
    let node = node(&env, &program, Concurrency::Serial);
    program.data.lock().resize(8192, 0);
    program.limits.lock().limits.size = 8192;
    assert_eq!(run(&env, &node, write(4096, 512, 1)), Err(IoError::out_of_range()));
    assert_eq!(node.resized().unwrap(), 8192);
    run(&env, &node, write(4096, 512, 1)).unwrap();
    program.limits.lock().limits.size = 8000;
    assert!(node.resized().is_err());
    program.limits.lock().limits = Limits::plain(8192);
    assert!(node.resized().is_err());
    assert_eq!((node.limits().size, node.limits().request_align), (8192, 512));
}
