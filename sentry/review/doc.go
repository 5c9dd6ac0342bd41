// Package review reads, on the developer's side, what the sandbox has changed and the host has not taken over: the private
// twin of a workspace, the integration files that changed on the host, and what is odd about the repositories. It applies
// or drops single changes when the developer says so.
//
// What is kept true, for the developer:
//   - both trees are hostile while they are read: every name is opened relative to a descriptor, below the tree and
//     without following a link; only directories and regular files are opened; names, sizes, depth and counts are bounded,
//     and what was not looked at is said;
//   - [Tree.Apply] puts on the host the bytes that were shown, or nothing: content, parent directory and the host's own
//     file are compared with what was reviewed, at the moment of the exchange;
//   - the half-made file has a name that the workspace server neither shows nor lets anyone make ([sentry.MarkTree]), so
//     that no handle on it can exist inside when it becomes a file that host programs obey;
//   - nothing here starts a program, and no Git is run;
//   - [Show] and [ShowLine] make text of the sandbox safe for a terminal.
//
// To wire it: make a [Tree] per served tree from the [sentry.Workspace] of the plan, take a [Tree.Baseline] of the first
// one before the sandbox starts, and [Take] the [Status] then, at the end of a session ([Status.Since]) and on request.
package review
