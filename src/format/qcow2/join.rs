//! Several futures of one request at once.

use crate::error::{IoError, IoResult};
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

/// Runs `futures` to their ends, at most `width` of them at a time; the first error among them. After an error no more are begun; those that run are
/// waited for, since their buffers belong to the request.
pub async fn join_bounded<'a, F>(futures: impl Iterator<Item = F> + Send + 'a, width: usize) -> IoResult
where
    F: Future<Output = IoResult> + Send + 'a,
{
    let mut futures = futures.fuse();
    let mut running: Vec<Pin<Box<F>>> = Vec::new();
    let mut failed: Option<IoError> = None;
    std::future::poll_fn(move |context| {
        loop {
            running.retain_mut(|f| match f.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(result) => {
                    failed = failed.or(result.err());
                    false
                }
            });
            let mut begun = false;
            while failed.is_none() && running.len() < width.max(1) {
                let Some(next) = futures.next() else { break };
                running.push(Box::pin(next));
                begun = true;
            }
            if !begun {
                break;
            }
        }
        match (running.is_empty(), failed) {
            (false, _) => Poll::Pending,
            (true, None) => Poll::Ready(Ok(())),
            (true, Some(e)) => Poll::Ready(Err(e)),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::{Context, Waker};

    struct Step<'a> {
        polls: usize,
        running: &'a AtomicUsize,
        most: &'a AtomicUsize,
        result: IoResult,
        begun: bool,
    }

    impl Future for Step<'_> {
        type Output = IoResult;
        fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<IoResult> {
            if !std::mem::replace(&mut self.begun, true) {
                self.most.fetch_max(self.running.fetch_add(1, SeqCst) + 1, SeqCst);
            }
            if self.polls > 0 {
                self.polls -= 1;
                return Poll::Pending;
            }
            self.running.fetch_sub(1, SeqCst);
            Poll::Ready(self.result)
        }
    }

    fn drive(steps: &[(usize, IoResult)], width: usize) -> (IoResult, usize, usize) {
        let (running, most, begun) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let futures = steps.iter().map(|(polls, result)| {
            begun.fetch_add(1, SeqCst);
            Step { polls: *polls, running: &running, most: &most, result: *result, begun: false }
        });
        let mut joined = std::pin::pin!(join_bounded(futures, width));
        let mut context = Context::from_waker(Waker::noop());
        let result = loop {
            if let Poll::Ready(r) = joined.as_mut().poll(&mut context) {
                break r;
            }
        };
        assert_eq!(running.load(SeqCst), 0, "all that began have ended");
        (result, most.load(SeqCst), begun.load(SeqCst))
    }

    #[test]
    fn all_run_and_never_more_than_the_width_at_once() {
        let steps: Vec<_> = (0..20).map(|i| (i % 4, Ok(()))).collect();
        for width in [1, 3, 20, 100] {
            let (result, most, begun) = drive(&steps, width);
            assert_eq!((result, begun), (Ok(()), 20));
            assert!(most <= width && (most == width || width > 15), "{most} of {width}");
        }
        assert_eq!(drive(&[], 4).0, Ok(()));
    }

    #[test]
    fn the_first_error_is_reported_after_those_that_run_have_ended() {
        let error = |n| Err(IoError::os(n));
        let steps = [(5, Ok(())), (1, error(5)), (0, Ok(())), (4, error(6)), (0, Ok(())), (0, Ok(()))];
        let (result, _, begun) = drive(&steps, 4);
        assert_eq!(result, error(5));
        assert!(begun < 7);
        let (_, _, begun) = drive(&[(0, error(1)), (0, Ok(())), (0, Ok(()))], 1);
        assert_eq!(begun, 1);
    }
}
