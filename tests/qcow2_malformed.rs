//! Images with damage at random places: whatever an image holds, opening and reading it ends, without a panic and in bounded memory.
//!
//! The images are small ones made by qemu-img (a tool that is missing makes the test pass with a line on stderr, or fail if `CI` is set). Damage is seeded, so a failure is repeated
//! with its number. Half of it goes where the structures are: header fields, extensions, L1 and L2 entries.

use cobweb::context::{Context, ContextOptions};
use cobweb::graph::ImplicitOpen;
use cobweb::node::Node;
use cobweb::options::Options;
use cobweb::request::{Buffers, Request};
use cobweb::units::ByteRange;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Mutants of each image.
const ROUNDS: u64 = 300;
/// Longest that one may take; a hang would be for ever, a slow machine is not one.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most memory that the test may need at any time, in KiB: a wild length taken at its word is far above.
const MEMORY_MAX: u64 = 600 << 10;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

fn run(dir: &Path, words: &[&str]) -> bool {
    match Command::new(words[0]).args(&words[1..]).current_dir(dir).output() {
        Ok(out) => {
            assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
            true
        }
        Err(_) => {
            assert!(std::env::var_os("CI").is_none(), "{} is not installed, and this is CI", words[0]);
            eprintln!("*** SKIPPED: {} is not installed ***", words[0]);
            false
        }
    }
}

/// Changes some bytes. Places of 8 bytes get values that are near what is valid, or wild.
fn damage(image: &mut Vec<u8>, rng: &mut Rng) {
    let words: Vec<u64> = (0..image.len() as u64 / 8).collect();
    // What is not zero is mostly structure.
    let filled: Vec<u64> = words
        .into_iter()
        .filter(|w| image[*w as usize * 8..][..8].iter().any(|b| *b != 0))
        .take(400)
        .collect();
    for _ in 0..1 + rng.below(4) {
        let word = match rng.below(4) {
            0 => rng.below(14),
            1 => rng.below(image.len() as u64 / 8),
            _ => filled[rng.below(filled.len() as u64) as usize],
        } as usize;
        let place = &mut image[word * 8..][..8];
        let old = u64::from_be_bytes(place.as_ref().try_into().expect("eight"));
        let new = match rng.below(6) {
            0 => old ^ 1 << rng.below(64),
            1 => rng.next(),
            2 => old.wrapping_add(1 << rng.below(64)),
            3 => [0, u64::MAX, i64::MAX as u64, 1 << 62, 1 << 63, u64::from(u32::MAX)][rng.below(6) as usize],
            4 => old & !(0xffff << (16 * rng.below(4))) | rng.below(1 << 16) << (16 * rng.below(4)),
            _ => old & !0xff | rng.below(256),
        };
        place.copy_from_slice(&new.to_be_bytes());
    }
    if rng.below(8) == 0 {
        let keep = rng.below(image.len() as u64) as usize;
        image.truncate(keep);
    }
}

/// Opens the image and reads some of it; whether it could be opened.
fn use_image(context: &Arc<Context>, path: &Path, rng: &mut Rng) -> bool {
    let mut o = Options::empty();
    o.set("driver", "qcow2").set("read-only", "on").set("l2-cache-size", "64k");
    o.set("file.driver", "file").set("file.read-only", "on");
    o.set("file.filename", path.to_str().expect("text"));
    let Ok(vertex) = context.graph().open(o) else { return false };
    let node: Arc<dyn Node> = vertex.top_node();
    let size = node.limits().size;
    let offsets: Vec<u64> =
        [0, size.saturating_sub(1 << 20), rng.below(size), rng.below(8 << 20).min(size)].into();
    let done = context.env().block_on(|cx| async move {
        for offset in offsets {
            let len = (1 << 20).min(size - offset.min(size));
            if len == 0 {
                continue;
            }
            let bufs = Buffers::alloc(len as usize, 512);
            // Errors are answers.
            let _ = cx.run(&*node, Request::read(offset, bufs)).await;
            let mut at = offset;
            for _ in 0..20 {
                if at >= size {
                    break;
                }
                match cx.status(&*node, ByteRange { offset: at, len: size - at }).await {
                    Ok(extent) => {
                        assert!(extent.len > 0 && extent.len <= size - at);
                        at += extent.len;
                    }
                    Err(_) => break,
                }
            }
        }
    });
    done.expect("may block");
    true
}

/// Peak memory of this process in KiB.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc");
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).expect("a peak");
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
}

#[test]
fn damaged_images_neither_panic_nor_hang_nor_take_much_memory() {
    let dir = tempfile::tempdir().expect("tempdir");
    let dir = dir.path();
    let commands = [
        "write -c -P 3 64k 64k",
        "write -P 1 0 64k",
        "write -P 2 256k 200k",
        "write -z 1M 128k",
        "write -P 9 7M 512",
    ];
    let images = [
        ("plain.q", "cluster_size=4k"),
        ("small.q", "cluster_size=512"),
        ("large.q", "cluster_size=64k,compression_type=zstd"),
        ("ext.q", "cluster_size=16k,extended_l2=on"),
        ("v2.q", "compat=0.10,cluster_size=4k"),
    ];
    if !run(dir, &["qemu-img", "create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "back.q", "8M"]) {
        return;
    }
    for (name, options) in images {
        let backed = [
            "qemu-img", "create", "-q", "-f", "qcow2", "-b", "back.q", "-F", "qcow2", "-o", options, name,
            "8M",
        ];
        run(dir, &backed);
        let mut io = vec!["qemu-io", "-f", "qcow2"];
        for c in commands {
            // qemu-io compresses whole clusters, of any size.
            if !(name == "v2.q" && c.contains("-z")) {
                io.extend(["-c", c]);
            }
        }
        io.push(name);
        if !run(dir, &io) {
            return;
        }
    }
    let context = Context::new(ContextOptions::default(), None).expect("context");
    context.start().expect("start");
    context.graph().set_implicit_open(ImplicitOpen::Allow);
    // Tasks catch panics and answer with an error; here they must not come to that.
    let panics = Arc::new(AtomicUsize::new(0));
    let (count, hook) = (panics.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |info| {
        count.fetch_add(1, Ordering::SeqCst);
        hook(info);
    }));
    let (mut opened, mut refused) = (0, 0);
    for (name, _) in images {
        let whole = std::fs::read(dir.join(name)).expect("made above");
        for seed in 0..ROUNDS {
            let mut rng = Rng(seed << 8 | name.len() as u64);
            let mut image = whole.clone();
            damage(&mut image, &mut rng);
            let path = dir.join("mutant.q");
            std::fs::write(&path, image).expect("written");
            let began = Instant::now();
            if use_image(&context, &path, &mut rng) {
                opened += 1;
            } else {
                refused += 1;
            }
            assert_eq!(panics.load(Ordering::SeqCst), 0, "{name}, seed {seed}");
            assert!(began.elapsed() < PATIENCE, "{name}, seed {seed} took {:?}", began.elapsed());
            context.graph().collect().expect("closed");
        }
    }
    assert!(
        opened > ROUNDS && refused > 50,
        "{opened} opened, {refused} refused: the damage is not what it should be"
    );
    let peak = peak_memory();
    assert!(peak < MEMORY_MAX, "{peak} KiB at most");
}
