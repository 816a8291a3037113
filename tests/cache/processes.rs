//! Several processes on one store. They are this test binary, started again: `store_child` then
//! serves requests from its standard input.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use makaira::jit::{Origin, Store};

use super::{ask, compiled, entry, folder, key};

/// Serves requests, a folder a line, with where the code came from.
fn serve(requests: impl BufRead, mut replies: impl Write) -> io::Result<()> {
    for folder in requests.lines() {
        let key = key("marlin_a", 13000);
        let compile = || {
            thread::sleep(Duration::from_millis(3));
            Ok::<_, io::Error>(compiled(&key))
        };
        let (cubin, origin) = Store::at(folder?).get_or_compile(&key, compile)?;
        let right = cubin == compiled(&key);
        writeln!(replies, "reply {origin:?} {right}")?;
        replies.flush()?;
    }
    Ok(())
}

/// A process that serves requests, when another test starts it; here, a short conversation.
#[test]
fn store_child() {
    if env::var_os("MAKAIRA_TEST_CHILD").is_some() {
        serve(io::stdin().lock(), io::stdout().lock()).expect("the pipes hold");
        return;
    }
    let folder = folder();
    let requests = format!("{0}\n{0}\n", folder.path().display());
    let mut replies = Vec::new();
    serve(requests.as_bytes(), &mut replies).expect("no failure");
    assert_eq!(String::from_utf8_lossy(&replies), "reply Compiled true\nreply Store true\n");
}

struct Server {
    child: Child,
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Server {
    fn start(mut command: Command) -> Self {
        let mut child = command
            .env("MAKAIRA_TEST_CHILD", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test starts again");
        let requests = child.stdin.take().expect("a pipe");
        let replies = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, requests, replies }
    }

    fn ask(&mut self, folder: &Path) {
        writeln!(self.requests, "{}", folder.display()).expect("the pipe holds");
    }

    fn reply(&mut self) -> String {
        loop {
            let mut line = String::new();
            let bytes = self.replies.read_line(&mut line).expect("the pipe holds");
            assert!(bytes > 0, "a child ended early");
            // The test harness prints before and beside us.
            if let Some((_, reply)) = line.split_once("reply ") {
                return reply.trim().to_owned();
            }
        }
    }

    fn end(self) {
        let Self { mut child, requests, mut replies } = self;
        drop(requests);
        io::copy(&mut replies, &mut io::sink()).expect("the pipe holds");
        assert!(child.wait().expect("it ends").success());
    }
}

fn child_arguments() -> [&'static str; 3] {
    ["--exact", "processes::store_child", "--nocapture"]
}

/// Fault B66: sixteen processes, the same key, an empty folder, fifty rounds: all get the right
/// code, one compiles, and whoever looks at the folder never sees a partial entry.
#[test]
fn b66_processes_that_start_together_compile_once() {
    let binary = env::current_exe().expect("this test has a path");
    let mut servers: Vec<Server> = (0..16)
        .map(|_| {
            let mut command = Command::new(&binary);
            command.args(child_arguments());
            Server::start(command)
        })
        .collect();
    let root = folder();
    let key = key("marlin_a", 13000);
    let mut whole = None;
    for round in 0..50 {
        let folder = root.path().join(round.to_string());
        for server in &mut servers {
            server.ask(&folder);
        }
        // Looks while they work: an entry that is visible is the complete one.
        let path = entry(&folder, &key);
        let patience = Instant::now() + Duration::from_secs(60);
        let seen = loop {
            match fs::read(&path) {
                Ok(bytes) => break bytes,
                Err(_) => assert!(Instant::now() < patience, "nothing appears"),
            }
        };
        let replies: Vec<String> = servers.iter_mut().map(Server::reply).collect();
        let count = |wanted| replies.iter().filter(|reply| *reply == wanted).count();
        assert_eq!(count("Compiled true"), 1, "round {round}: {replies:?}");
        assert_eq!(count("Store true"), 15, "round {round}: {replies:?}");
        assert_eq!(fs::read(&path).expect("an entry"), seen, "round {round}: a partial entry");
        assert_eq!(*whole.get_or_insert(seen.clone()), seen, "round {round}");
    }
    for server in servers {
        server.end();
    }
}

/// Fault B70: a full disk, played by a limit of zero bytes on files. The code is there all the
/// same.
#[cfg(unix)]
#[test]
fn b70_a_full_disk_costs_no_failure() {
    let folder = folder();
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -f 0; trap '' XFSZ; exec \"$0\" \"$@\""])
        .arg(env::current_exe().expect("this test has a path"))
        .args(child_arguments());
    let mut server = Server::start(command);
    for _ in 0..2 {
        server.ask(folder.path());
        assert_eq!(server.reply(), "Compiled true");
    }
    server.end();
    let store = Store::at(folder.path());
    assert_eq!(store.list().expect("a listing"), [], "no partial entry is left");
    assert_eq!(ask(&store, &key("marlin_a", 13000)), Origin::Compiled);
    assert_eq!(ask(&store, &key("marlin_a", 13000)), Origin::Store);
}
