//! Serves one disk over NBD until standard input ends.
//!
//! ```text
//! cargo run --example nbd_server -- 'driver=file,filename=disk.img,cache.direct=on' /tmp/disk.sock
//! nbdinfo 'nbd+unix:///?socket=/tmp/disk.sock'
//! ```

use cobweb::context::{Context, ContextOptions};
use cobweb::error::Result;
use cobweb::export::nbd::{Address, Export, Server};
use cobweb::options::Options;
use std::path::PathBuf;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [options, path] = args.as_slice() else {
        eprintln!("usage: nbd_server OPTIONS SOCKET");
        std::process::exit(2);
    };
    if let Err(e) = serve(options, path) {
        eprintln!("nbd_server: {}", e.full_text());
        std::process::exit(1);
    }
}

fn serve(options: &str, path: &str) -> Result<()> {
    let context = Context::new(ContextOptions::default(), None)?;
    context.start()?;
    let graph = context.graph();
    let node = graph.open(Options::parse(options)?)?;
    // The disk is what the export stands on: nodes can be changed below it while clients are connected.
    let disk = graph.add_disk("disk0")?;
    graph.insert(&disk, Some(node))?;

    let server = Server::start(context.env(), &Address::Unix(PathBuf::from(path)), 0)?;
    let export = Export { name: String::new(), description: options.to_owned(), disk, writable: true };
    server.add_export(export)?;
    println!("serving on {}", server.address());
    // Reading is only a way to wait; an error ends the wait too.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    server.stop();
    Ok(())
}
