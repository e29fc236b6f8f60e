//! What is done with images as files: making and checking them.

use super::Graph;
use crate::error::{Error, Result};
use crate::format::qcow2::Qcow2Node;
use crate::format::qcow2::create::{BackingName, CreateOptions, create};
use crate::io::file::{create_file, remove_file};
use crate::node::Vertex;
use crate::options::Options;
use crate::sync::Arc;
use std::path::{Path, PathBuf};

impl Graph {
    /// Creates an image. `driver=file` or `raw` with `filename` (or `file.filename`) and `size` makes a sparse file; `driver=qcow2` takes what
    /// [`crate::format::qcow2::CREATE_PROPS`] lists. Blocks. The file must not be there; after an error there is none.
    ///
    /// Errors: EEXIST; EINVAL and a sentence that names the option; EFBIG; else what the system answered.
    pub fn create_image(self: &Arc<Self>, mut options: Options) -> Result<()> {
        let driver = options.require_str("driver")?;
        let name = match options.take_str("file.filename")? {
            Some(name) => name,
            None => options.require_str("filename")?,
        };
        let path = Path::new(&name);
        match driver.as_str() {
            "file" | "raw" => {
                let size = options.require_size("size")?;
                options.finish()?;
                create_file(path, size).map(drop)
            }
            "qcow2" => {
                let new = CreateOptions::take(&mut options, |backing| self.backing_size(path, backing))?;
                options.finish()?;
                self.create_qcow2(path, &new)
            }
            other => Err(Error::unsupported(format!("driver '{other}' cannot create images"))),
        }
    }

    /// What a check of an open image finds, as JSON text; `None` if its format has none. Walks the whole image. Blocks.
    pub fn check_image(&self, node: &Vertex) -> Option<Result<String>> {
        let image: &Qcow2Node = node.base().as_any().downcast_ref()?;
        Some(self.env().block_on(|cx| async move { image.check_json(&cx).await }).and_then(|found| found))
    }

    /// Bytes of the disk in a backing file, which is found beside the image that will name it.
    fn backing_size(self: &Arc<Self>, image: &Path, backing: &BackingName) -> Result<u64> {
        let name = String::from_utf8(backing.name.clone()).map_err(|_| {
            Error::invalid("option 'size' is needed: the name of the backing file is not text")
        })?;
        let path = image.parent().unwrap_or(Path::new("")).join(name);
        let text = serde_json::json!({
            "driver": backing.format, "read-only": true, "backing": null,
            "file": {"driver": "file", "filename": path, "read-only": true},
        });
        let mut options = Options::from_json(&text)?;
        if backing.format == "raw" {
            options.take_value("backing");
        }
        let node = self.open(options)?;
        let size = node.top_node().limits().size;
        self.forget_node(&node)?;
        drop(node);
        self.collect()?;
        Ok(size)
    }

    fn create_qcow2(self: &Arc<Self>, path: &Path, new: &CreateOptions) -> Result<()> {
        let file = Fresh::make(self, path)?;
        let data = match &new.data_file {
            None => None,
            Some(data) => {
                let name = String::from_utf8(data.name.clone())
                    .map_err(|_| Error::invalid("the name of the data file is not text"))?;
                Some(Fresh::make(self, Path::new(&name))?)
            }
        };
        let (node, data_node) = (file.node.top_node(), data.as_ref().map(|d| d.node.top_node()));
        let made =
            self.env().block_on(|cx| async move { create(&cx, &*node, data_node.as_deref(), new).await })?;
        for fresh in [Some(file), data].into_iter().flatten() {
            fresh.end(made.is_ok())?;
        }
        made
    }
}

/// A file that has just been made, open; removed again unless it is kept.
struct Fresh<'a> {
    graph: &'a Arc<Graph>,
    node: Arc<Vertex>,
    path: PathBuf,
    keep: bool,
}

impl<'a> Fresh<'a> {
    fn make(graph: &'a Arc<Graph>, path: &Path) -> Result<Self> {
        drop(create_file(path, 0)?);
        let text = serde_json::json!({"driver": "file", "filename": path});
        match Options::from_json(&text).and_then(|o| graph.open(o)) {
            Ok(node) => Ok(Self { graph, node, path: path.to_owned(), keep: false }),
            Err(e) => {
                // Ours: made above, and exclusively.
                let _ = remove_file(path);
                Err(e)
            }
        }
    }

    fn end(mut self, keep: bool) -> Result<()> {
        self.keep = keep;
        self.graph.forget_node(&self.node)
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        if !self.keep {
            // Nobody else knows of it. What cannot be removed stays, and the error that led here is told.
            let _ = remove_file(&self.path);
        }
    }
}
