//! `cobweb_export`: servers.

use super::abi::{cobweb_ctx, cobweb_error, cobweb_export};
use super::boundary::{self, null, put, text};
use super::ctx::ctx;
use super::handle::Object;
use crate::error::Error;
use crate::options::Options;
use libc::{c_char, c_int};

/// A running export.
pub(super) struct ExportRef(Box<dyn Send>);

impl Object for ExportRef {
    type Raw = cobweb_export;
    const MARK: u64 = 0x636f_6277_6562_0007;
    const NAME: &'static str = "export";
}

/// Starts a server for a node or disk. `type`: "nbd" with `device` (node or disk name), `addr.type` (unix, inet), `addr.path` or `addr.host` and `addr.port`, `name` (export name,
/// default the device's), `writable` (default off). May block. Errors: -ENOTSUP for an unknown type, -EINVAL, -EADDRINUSE.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_export_start(
    c: *mut cobweb_ctx,
    kind: *const c_char,
    options: *const c_char,
    out: *mut *mut cobweb_export,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (ctx, kind, options) = unsafe { (ctx(c)?, text(kind, "type")?, text(options, "options")?) };
        if out.is_null() {
            return Err(null("out"));
        }
        let options = Options::parse(options)?;
        let export: Box<dyn Send> = match kind {
            #[cfg(feature = "nbd")]
            "nbd" => Box::new(nbd::start(ctx, options)?),
            other => {
                let _ = (ctx, options);
                return Err(Error::unsupported(format!("there is no export type '{other}'")));
            }
        };
        // SAFETY: checked above.
        unsafe { put(out, ExportRef(export).into_raw()) };
        Ok(0)
    })
}

/// Stops a server: no new connections, running requests end (bounded). NULL is allowed. May block.
///
/// # Safety
/// `x` is a handle or NULL and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_export_stop(x: *mut cobweb_export) {
    boundary::call_unit(|| {
        // SAFETY: the caller's duty.
        if let Some(ExportRef(export)) = unsafe { ExportRef::take(x) } {
            drop(export);
        }
        Ok(())
    });
}

#[cfg(feature = "nbd")]
mod nbd {
    //! The NBD server from option text.

    use crate::context::Context;
    use crate::error::Result;
    use crate::export::nbd::{Address, Export, Server};
    use crate::graph::Disk;
    use crate::options::Options;
    use crate::sync::Arc;

    const CONNECTIONS_MAX: usize = 100;

    /// A server with one export. The disk of a node that is exported is the export's own.
    pub(super) struct Running {
        ctx: Arc<Context>,
        server: Arc<Server>,
        own: Option<Arc<Disk>>,
        shutdown: u64,
    }

    pub(super) fn start(ctx: &Arc<Context>, mut o: Options) -> Result<Running> {
        let device = o.require_str("device")?;
        let address = match o.require_str("addr.type")?.as_str() {
            "unix" => Address::Unix(o.require_str("addr.path")?.into()),
            "inet" => {
                let host = o.require_str("addr.host")?;
                let port = o.take_u64_in("addr.port", 0..=65535)?.unwrap_or(10809);
                Address::Tcp(host, port as u16)
            }
            _ => return Err(o.invalid("addr.type", "is not unix or inet")),
        };
        let name = o.take_str("name")?.unwrap_or_else(|| device.clone());
        let writable = o.take_bool("writable")?.unwrap_or(false);
        let connections = o.take_u64_in("max-connections", 1..=10_000)?.unwrap_or(CONNECTIONS_MAX as u64);
        o.finish()?;
        let graph = ctx.graph();
        let (disk, own) = match graph.disk(&device) {
            Ok(disk) => (disk, None),
            Err(_) => {
                let node = graph.node(&device)?;
                let disk = graph.add_disk("")?;
                graph.insert(&disk, Some(node))?;
                (disk.clone(), Some(disk))
            }
        };
        let server = Arc::new(Server::start(ctx.env(), &address, connections as usize)?);
        server.add_export(Export { name, description: String::new(), disk, writable })?;
        let weak = Arc::downgrade(&server);
        let shutdown = ctx.on_shutdown(move || {
            if let Some(server) = weak.upgrade() {
                server.stop();
            }
        });
        Ok(Running { ctx: ctx.clone(), server, own, shutdown })
    }

    impl Drop for Running {
        fn drop(&mut self) {
            self.ctx.forget_shutdown(self.shutdown);
            self.server.stop();
            if let Some(disk) = &self.own {
                self.ctx.graph().remove_disk(disk);
                // A node that cannot be settled stays and says so in the log.
                if let Err(e) = self.ctx.graph().collect() {
                    self.ctx.env().log(1, "export", &e.full_text());
                }
            }
        }
    }
}
