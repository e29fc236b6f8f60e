//! Damaged images: what qemu-img check finds, ours finds.

use super::script::have;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// An image under the knife.
struct Image {
    file: File,
    l1: u64,
    l2: u64,
    reftable: u64,
    refblock: u64,
    snapshots: u64,
    /// Bitmap extension, directory, first table.
    bitmaps: Option<[u64; 3]>,
    /// Bytes of an L2 entry.
    entry: u64,
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;

impl Image {
    fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("open");
        let mut image =
            Self { file, l1: 0, l2: 0, reftable: 0, refblock: 0, snapshots: 0, bitmaps: None, entry: 8 };
        image.l1 = image.word(40);
        image.l2 = image.word(image.l1) & OFFSET;
        image.reftable = image.word(48);
        image.refblock = image.word(image.reftable);
        image.snapshots = image.word(64);
        if image.word(72) & 16 != 0 {
            image.entry = 16;
        }
        let mut at = 112;
        while image.half(4) == 3 && image.half(at) != 0 {
            if image.half(at) == 0x2385_2875 {
                let directory = image.word(at + 8 + 16);
                image.bitmaps = Some([at + 8, directory, image.word(directory)]);
            }
            at += 8 + u64::from(image.half(at + 4)).next_multiple_of(8);
        }
        image
    }

    fn bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let _ = self.file.read_at(&mut bytes, at).expect("read");
        bytes
    }

    fn word(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.bytes(at))
    }

    fn half(&self, at: u64) -> u32 {
        u32::from_be_bytes(self.bytes(at))
    }

    fn set(&self, at: u64, value: u64) {
        self.file.write_all_at(&value.to_be_bytes(), at).expect("write");
    }

    fn set_half(&self, at: u64, value: u32) {
        self.file.write_all_at(&value.to_be_bytes(), at).expect("write");
    }

    fn l2_at(&self, index: u64) -> u64 {
        self.l2 + index * self.entry
    }

    /// Changes an L2 entry.
    fn l2(&self, index: u64, change: impl Fn(u64) -> u64) {
        let at = self.l2_at(index);
        self.set(at, change(self.word(at)));
    }

    fn count(&self, cluster: u64, refcount: u16) {
        self.file.write_all_at(&refcount.to_be_bytes(), self.refblock + 2 * cluster).expect("write");
    }
}

/// How the two reports may differ.
#[derive(Clone, Copy, PartialEq)]
enum Expect {
    /// Not at all.
    Same,
    /// Ours may have more findings.
    More,
    /// The real tool refuses to open the image, because of a bitmap; ours reports it (qcow2.md section 2, point 3).
    Bitmap,
}
use Expect::{Bitmap, More, Same};

type Damage = (&'static str, Expect, fn(&Image));

const PLAIN: &[Damage] = &[
    ("nothing", Same, |_| {}),
    ("a count too high", Same, |i| i.count(5, 2)),
    ("a count too low", Same, |i| i.count(5, 0)),
    ("a count of the header", Same, |i| i.count(0, 0)),
    ("a count of the refcount table", Same, |i| i.count(1, 0)),
    ("a count of a refcount block", Same, |i| i.count(2, 0)),
    ("a count of the L1 table", Same, |i| i.count(3, 0)),
    ("a count of an L2 table", Same, |i| i.count(4, 0)),
    ("a cluster counted and not used", Same, |i| i.count(24, 7)),
    ("a copied flag missing", Same, |i| i.l2(0, |e| e & !COPIED)),
    ("a cluster used twice", Same, |i| i.l2(1, |e| e - 65536)),
    ("an offset not aligned", Same, |i| i.l2(1, |e| e + 512)),
    ("a preallocated cluster not aligned", Same, |i| i.l2(1, |e| e + 513)),
    ("a reserved bit", Same, |i| i.l2(1, |e| e | 4)),
    ("a reserved bit above", Same, |i| i.l2(1, |e| e | 1 << 60)),
    ("an offset outside", Same, |i| i.l2(1, |_| COPIED | 1 << 32)),
    ("an offset far outside", Same, |i| i.l2(1, |_| 0x80ff_ffff_fff0_0000)),
    ("an offset just outside", Same, |i| i.l2(1, |_| COPIED | 0x20_0000)),
    ("an offset of 0", Same, |i| i.l2(1, |_| COPIED)),
    ("compressed and copied", Same, |i| i.l2(32, |e| e | COPIED)),
    ("compressed outside", Same, |i| i.l2(32, |e| e | 1 << 40)),
    ("compressed in the header", Same, |i| i.l2(32, |e| e & !0xfff_ffff | 0x200)),
    ("an L1 entry not aligned", Same, |i| i.set(i.l1, i.word(i.l1) | 0x200)),
    ("an L1 entry with a reserved bit", Same, |i| i.set(i.l1, i.word(i.l1) | 1)),
    ("an L1 entry without copied flag", Same, |i| i.set(i.l1, i.word(i.l1) & !COPIED)),
    ("an L1 entry outside", Same, |i| i.set(i.l1, COPIED | 1 << 32)),
    ("an L1 entry far outside", Same, |i| i.set(i.l1, 0x80ff_ffff_ffff_0000)),
    ("an L1 entry that points at a refcount block", Same, |i| i.set(i.l1, COPIED | i.refblock)),
    ("an L1 entry that points at its table", Same, |i| i.set(i.l1, COPIED | i.l1)),
    ("a refcount table entry with a reserved bit", Same, |i| i.set(i.reftable, i.refblock | 1)),
    ("a refcount table entry not aligned", More, |i| i.set(i.reftable, i.refblock | 0x200)),
    ("a refcount block outside", Same, |i| i.set(i.reftable, 1 << 32)),
    ("a second refcount block outside", Same, |i| i.set(i.reftable + 8, 1 << 32)),
    ("a refcount block used twice", Same, |i| i.set(i.reftable + 8, i.refblock)),
    ("no refcount block", Same, |i| i.set(i.reftable, 0)),
    ("no refcount table", Same, |i| i.set_half(56, 0)),
    ("the dirty bit", Same, |i| i.set(72, 1)),
    ("the corrupt bit", Same, |i| i.set(72, 2)),
    ("an unknown feature", Same, |i| i.set(72, 32)),
    ("an unknown version", Same, |i| i.set_half(4, 9)),
    ("a file cut off", Same, |i| i.file.set_len(0x10_0000).expect("truncate")),
];

const EXTENDED: &[Damage] = &[
    ("nothing", Same, |_| {}),
    ("both states", Same, |i| i.set(i.l2_at(1) + 8, 0x1_0000_0001)),
    ("allocated without a cluster", Same, |i| i.set(i.l2_at(1), 0)),
    ("a cluster for nothing", Same, |i| i.set(i.l2_at(1) + 8, 0)),
    ("an offset not aligned", Same, |i| i.l2(1, |e| e + 512)),
    ("a bitmap on a compressed cluster", Same, |i| i.set(i.l2_at(128) + 8, 5)),
    ("the zero bit of standard entries", More, |i| i.l2(1, |e| e | 1)),
    ("a copied flag on nothing", Same, |i| {
        i.set(i.l2_at(1), COPIED);
        i.set(i.l2_at(1) + 8, 0);
    }),
];

const DATA_FILE: &[Damage] = &[
    ("nothing", Same, |_| {}),
    ("a copied flag missing", Same, |i| i.l2(1, |e| e & !COPIED)),
    ("an offset not aligned", More, |i| i.l2(1, |e| e + 512)),
    ("another offset", More, |i| i.l2(1, |e| e + 65536)),
    ("compressed", Same, |i| i.l2(1, |_| 1 << 62 | 0x5_0000)),
];

const SNAPSHOTS: &[Damage] = &[
    ("nothing", Same, |_| {}),
    ("a table not aligned", Same, |i| i.set(64, i.snapshots + 512)),
    ("a table outside", Same, |i| i.set(64, 1 << 40)),
    ("one too many", Same, |i| i.set_half(60, 3)),
    ("one forgotten", Same, |i| i.set_half(60, 1)),
    ("all forgotten", Same, |i| i.set_half(60, 0)),
    ("an L1 table not aligned", Same, |i| i.set(i.snapshots, i.word(i.snapshots) + 512)),
    ("an L1 table too large", Same, |i| i.set_half(i.snapshots + 8, 0x7fff_ffff)),
    ("an L1 table outside", Same, |i| i.set(i.snapshots, 1 << 40)),
    ("more extra data than there can be", More, |i| i.set_half(i.snapshots + 36, 2000)),
    ("a long id", Same, |i| i.set_half(i.snapshots + 12, 60000 << 16 | 3)),
    ("bitmaps void", More, |i| i.set(88, 0)),
    ("a bitmap table outside", Same, |i| i.set(bitmap(i, 1), 1 << 40)),
    ("a bitmap in an L2 table", Same, |i| i.set(bitmap(i, 2), 0x5_0000)),
    ("a bitmap outside", Same, |i| i.set(bitmap(i, 2), 1 << 40)),
    ("a bitmap of ones", Same, |i| i.set(bitmap(i, 2), 1)),
    ("a bitmap in use", Same, |i| i.set_half(bitmap(i, 1) + 12, 1)),
    ("a bitmap entry not aligned", Bitmap, |i| i.set(bitmap(i, 2), 0x200)),
    ("a bitmap table not aligned", Bitmap, |i| i.set(bitmap(i, 1), i.word(bitmap(i, 1)) + 8)),
    ("a bitmap table too large", Bitmap, |i| i.set_half(bitmap(i, 1) + 8, 1 << 28)),
    ("reserved bitmap flags", Bitmap, |i| i.set_half(bitmap(i, 1) + 12, 1 << 31)),
    ("a bitmap without end", Bitmap, |i| i.set_half(bitmap(i, 1) + 20, u32::MAX)),
    ("more bitmaps than there are", Bitmap, |i| i.set_half(bitmap(i, 0), 3)),
    ("a directory not aligned", Bitmap, |i| i.set(bitmap(i, 0) + 16, bitmap(i, 1) + 8)),
];

fn bitmap(i: &Image, which: usize) -> u64 {
    i.bitmaps.expect("a bitmap extension")[which]
}

#[test]
fn check_finds_in_damaged_images_what_qemu_img_check_finds() {
    if !have("qemu-img") || !have("qemu-io") {
        return;
    }
    let dir = tempfile::tempdir().expect("tempdir");
    let fill = "qemu-io -c 'write 0 1M' -c 'write -c 2M 64k' -c 'write -c 2112k 64k' -c 'write -z 4M 1M' -c 'write 5M 192k'";
    let plain = format!("qemu-img create -q -f qcow2 a.q 64M && {fill} a.q");
    let extended =
        format!("qemu-img create -q -f qcow2 -o extended_l2=on,cluster_size=16k a.q 64M && {fill} a.q");
    let data_file = "qemu-img create -q -f qcow2 -o data_file=df.raw a.q 64M && qemu-io -c 'write 0 1M' -c 'write -z 0 64k' a.q";
    let snapshots = "qemu-img create -q -f qcow2 a.q 64M && qemu-io -c 'write 0 1M' a.q && qemu-img snapshot -c one a.q && \
        qemu-io -c 'write 0 128k' a.q && qemu-img snapshot -c two a.q && qemu-img bitmap --add a.q b0 && \
        qemu-img bitmap --add -g 64k a.q b1 && qemu-io -c 'write 8M 128k' a.q";
    let mut wrong = Vec::new();
    for (kind, make, list) in [
        ("plain", plain.as_str(), PLAIN),
        ("extended", &extended, EXTENDED),
        ("data file", data_file, DATA_FILE),
        ("snapshots", snapshots, SNAPSHOTS),
    ] {
        sh(dir.path(), &format!("rm -f *; ({make}) >/dev/null && cp a.q good"));
        for (name, expect, damage) in list {
            sh(dir.path(), "cp good a.q");
            damage(&Image::open(&dir.path().join("a.q")));
            if let Err(text) = compare(dir.path(), *expect) {
                wrong.push(format!("{kind}, {name}: {text}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a check said: exit code, findings with how often they occur, the rest of its output.
struct Said {
    code: i32,
    findings: HashMap<String, usize>,
    out: String,
}

fn check(dir: &Path, program: &str) -> Said {
    // Some damage makes qemu-img run without end.
    let out = Command::new("timeout")
        .args(["60", program, "check", "a.q"])
        .current_dir(dir)
        .output()
        .expect("it runs");
    let err = String::from_utf8_lossy(&out.stderr)
        .replace("qemu-img: ", "PROGRAM: ")
        .replace("cobweb: ", "PROGRAM: ");
    let mut findings = HashMap::new();
    for line in err.lines() {
        *findings.entry(line.to_owned()).or_default() += 1;
    }
    let code = out.status.code().expect("it ended by itself");
    Said { code, findings, out: String::from_utf8_lossy(&out.stdout).into_owned() }
}

fn compare(dir: &Path, expect: Expect) -> Result<(), String> {
    let real = check(dir, "qemu-img");
    let ours = check(dir, env!("CARGO_BIN_EXE_cobweb"));
    let missing: Vec<&String> = real
        .findings
        .iter()
        .filter(|(line, n)| line.starts_with("ERROR") && ours.findings.get(*line).is_none_or(|m| m < n))
        .map(|(line, _)| line)
        .collect();
    let same = real.code == ours.code && real.out == ours.out && real.findings == ours.findings;
    let ok = match expect {
        Same => same,
        More => missing.is_empty() && (ours.code == real.code || (real.code == 0 && ours.code == 2)),
        Bitmap => real.code == 1 && ours.code == 2 && ours.findings.keys().any(|l| l.contains("bitmap")),
    };
    if ok {
        return Ok(());
    }
    let show = |s: &Said| {
        let mut lines: Vec<&String> = s.findings.keys().collect();
        lines.sort();
        lines.truncate(8);
        format!("code {}, {:?} {lines:#?}", s.code, s.out)
    };
    Err(format!("real: {}\nours: {}", show(&real), show(&ours)))
}

fn sh(dir: &Path, command: &str) {
    let out = Command::new("sh").args(["-ec", command]).current_dir(dir).output().expect("sh");
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}
