//! Sessions of a small client of our own with a server over a unix socket.

mod client;
mod hostile;
mod session;
mod support;
mod togetherness;
