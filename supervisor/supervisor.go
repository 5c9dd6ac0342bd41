// Package supervisor runs Domains: it turns an Agent Profile and an Agent Workspace into a [Plan], keeps the one
// Coordinator of each Domain, and gives every Client Session its place in the Domain's sandbox.
//
// Four processes of this package take part; each is entered in its own way:
//
//	[Enter]            the client: owns the developer's terminal, starts the coordinator if there is none
//	[CoordinatorMain]  role "coordinator": owns every resource of the Domain, for as long as it has sessions
//	[DomainMain]       role "domain": pid 1 of the Domain's namespaces; mounts, bundle, runsc
//	[StorageMain]      role "storage": one command on images, State Anchors or leftovers, as root of the Domains' id map
//
// What is kept true: a Domain has at most one coordinator (an exclusive lock on its runtime directory, OR-1); whatever
// ends the coordinator ends the domain process and all below it; nothing in a workspace is read as configuration (SR-5).
//
// Leaf packages (nsenter, overlay, …) do the work and do not know each other; this package wires them.
package supervisor
