// Package nsenter makes the kernel objects an Agent Sandbox lives in, and starts the pinned runsc inside them.
//
// It keeps three things true for its caller, the supervisor:
//
//   - A process started by [Child.Start] holds no descriptor, environment variable, controlling terminal or namespace
//     of its parent beyond those listed in the [Child] (SR-3, SR-12).
//   - It dies with its parent, however that ends: by PR_SET_PDEATHSIG, and because every role returns when its control
//     connection reads end of file. A Domain's first process is pid 1 of a pid namespace, so all below it dies too (OR-1).
//   - Only a runsc that answers our stamp is ever used (SR-2, [Runtime]).
//
// A role is a function of this same executable, entered by re-exec: main calls [Main] before it reads a flag. The
// supervisor decides what the roles do; mounts, routes and sessions are not known here.
//
//	supervisor                         role "domain"
//	    ---- clone, new namespaces ---->   blocks on its control connection; environment is already empty
//	    ---- uid_map and gid_map   ---->   (newuidmap, newgidmap; written directly by real root)
//	    ---- "mapped"              ---->   becomes uid 0 of its user namespace, with all capabilities there
//	    <--- first message of the role ---
package nsenter
