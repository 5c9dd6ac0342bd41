// Package runner pins what was approved and runs exactly that on the host, as the developer.
//
// A [Plan] holds descriptors of the working directory and the program from the moment they are shown to the developer.
// Between approval and execution the sandbox may swap directories, links, scripts and programs; so just before the
// program is executed everything is looked at again, through the descriptors and by name, and a difference refuses the
// run. What the sandbox itself can write (a script in the workspace) is hashed when it is shown, and executed from a
// sealed copy with that hash: there is no moment at which a write could get in. The price is that such a script sees
// /proc/self/fd/3 as its own name; a rule with ByPath runs it by its path instead, with the hash checked just before.
//
// A command is supervised by a process of its own, the runner role, which is this binary executed again:
//
//	coordinator                        runner                     command
//	   ---- plan, descriptors ---->       environment is empty, child subreaper
//	   ---- go ------------------->       directory, program, files verified; fork, exec --->
//	   <--- failed ----------------       instead, if anything is not as it was approved
//	   ---- kill (grace) --------->       SIGTERM to the group, then SIGKILL to all below
//	   <--- ended -----------------       after nothing of the command is left
//
// The command has its own session and process group and no controlling terminal; it has no descriptor but its standard
// ones and no environment but the plan's. When it ends, whatever it left behind is killed: descendants that changed
// their session come back to the runner, because it is their subreaper. When the coordinator dies, the control socket
// reads EOF (and a signal arrives) and the runner kills all of it (OR-3).
//
// What is out of reach: a descendant with other credentials (an approved sudo) cannot be killed by a process of the
// developer; the end of the run then says so ([Exit.Left]).
package runner
